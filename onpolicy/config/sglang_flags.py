"""Flags given as --sglang-*: SGLang's own, passed through, less those that a contract decides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TypeVar

from onpolicy.errors import ConfigError

N = TypeVar("N", int, float)

PREFIX = "--sglang-"

_OURS = {
    "model-path": "--hf-checkpoint",
    "model": "--hf-checkpoint",
    "host": "--rollout-host",
    "port": "--rollout-base-port",
    "api-key": "--rollout-api-key",
    "dtype": "--dtype",
    "trust-remote-code": "--trust-remote-code",
    "random-seed": "--seed",
    "device": "CUDA_VISIBLE_DEVICES= to hide a GPU",
    "config": "--custom-config-path, a file that takes sglang_* keys too",
}

_ATTENTION = "the attention operator is part of the contract"
_WEIGHTS = "the engine must hold the weights that are trained, bit for bit"
_SAMPLED = "tokens are sampled from softmax(logits / temperature) alone"
_COMPILED = "compiled operators round differently from the aligned ones"
_FUSED = "a kernel of whole layers takes the place of the operators in the contract"
_SHARED = "the contract knows one way to share a model: tensor parallelism"
_SUMS = "the order of sums over ranks is part of the contract"

_UNALIGNED = {
    "attention-backend": _ATTENTION,
    "prefill-attention-backend": _ATTENTION,
    "decode-attention-backend": _ATTENTION,
    "enable-lean-attention": _ATTENTION,
    "page-size": "the attention operator reads pages of one token",
    "bf16-gemm-backend": "matrix products are part of the contract",
    "enable-tf32-matmul": "it rounds float32 products to TF32, rotary angles among them",
    "enable-fused-qk-norm-rope": "norms and rotary embeddings are part of the contract",
    "enable-amd-monokernel": _FUSED,
    "enable-nvidia-megakernel": _FUSED,
    "monokernel-backend": _FUSED,
    "sampling-backend": "the sampler is part of the contract",
    "tokenizer-worker-num": "requests are checked and given their seeds in one process",
    "enable-custom-logit-processor": _SAMPLED,
    "enable-watermark": _SAMPLED,
    "watermark-config": _SAMPLED,
    "model-impl": "both engines run the Hugging Face model definition",
    "json-model-override-args": "both engines run the model that the checkpoint describes",
    "kv-cache-dtype": "cached keys and values must keep the bits that training computes",
    "quantization": _WEIGHTS,
    "torchao-config": _WEIGHTS,
    "modelopt-quant": _WEIGHTS,
    "quantize-and-serve": _WEIGHTS,
    "rl-quant-profile": _WEIGHTS,
    "speculative-algorithm": "accepted draft tokens are not samples of softmax(logits / temperature)",
    "speculative-draft-model-path": "draft models are not part of the contract",
    "speculative-draft-model": "draft models are not part of the contract",
    "enable-lora": "adapters are not part of the model that is trained",
    "lora-paths": "adapters are not part of the model that is trained",
    "enable-torch-compile": _COMPILED,
    "cuda-graph-tc-compiler": _COMPILED,
    "piecewise-cuda-graph-compiler": _COMPILED,
    "enforce-piecewise-cuda-graph": _COMPILED,
    "enable-flashinfer-allreduce-fusion": _SUMS,
    "flashinfer-allreduce-fusion-backend": _SUMS,
    "enable-aiter-allreduce-fusion": _SUMS,
    "enable-fused-moe-sum-all-reduce": _SUMS,
    "enable-mscclpp": _SUMS,
    "enable-torch-symm-mem": _SUMS,
    "enable-layernorm-sp": _SUMS,
    "dcp-size": _SUMS,
    "decode-context-parallel-size": _SUMS,
    "attn-cp-size": _SUMS,
    "attention-context-parallel-size": _SUMS,
    "enable-kv-cache-sharding": _SUMS,
    "enable-quant-communications": "it rounds what tensor-parallel ranks tell each other",
    "enable-fp32-lm-head": "the output projection is part of the contract",
    "enable-dp-attention": _SHARED,
    "attn-dp-size": _SHARED,
    "attention-data-parallel-size": _SHARED,
    "rl-on-policy-target": "the contract's operators take its place",
}

TENSOR_PARALLEL = ("--tp-size", "--tensor-parallel-size", "--tp")

_COMPILED_GRAPH = "tc_piecewise"
"""A kind of CUDA graph, given to --cuda-graph-backend-prefill or inside --cuda-graph-config."""


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate --sglang-* flags and their values from the rest: (rest, SGLang's arguments).

    Like our own flags, they may be written with _ for -.
    """
    rest: list[str] = []
    sglang: list[str] = []
    target = rest
    for arg in argv:
        name, equals, value = arg.partition("=")
        if (flag := name.replace("_", "-")).startswith(PREFIX):
            target = sglang
            target.append("--" + flag[len(PREFIX) :] + equals + value)
        elif arg.startswith("--"):
            target = rest
            target.append(arg)
        else:
            target.append(arg)
    return rest, sglang


def tensor_parallel_size(sglang_args: Sequence[str]) -> int:
    """Devices of one server: the value of --sglang-tp-size, 1 if it is not given.

    Raises ConfigError for a value that is no number of devices.
    """
    size = _count(sglang_args, TENSOR_PARALLEL, "Give a number of devices, such as 2.")
    return 1 if size is None else size


def gives_tensor_parallel_size(sglang_args: Sequence[str]) -> bool:
    """Whether the degree is among SGLang's arguments, under any of its names."""
    return _count(sglang_args, TENSOR_PARALLEL, "Give a number of devices, such as 2.") is not None


def max_total_tokens(sglang_args: Sequence[str]) -> int | None:
    """Tokens of the key/value cache: the value of --sglang-max-total-tokens, if it is given.

    Raises ConfigError for a value that is no number of tokens.
    """
    return _count(sglang_args, ("--max-total-tokens",), "Give a number of tokens, such as 16384.")


def context_length(sglang_args: Sequence[str]) -> int | None:
    """Tokens that the engine serves at most: the value of --sglang-context-length, if it is given.

    Raises ConfigError for a value that is no number of tokens.
    """
    return _count(sglang_args, ("--context-length",), "Give a number of tokens, such as 4096.")


def chunked_prefill_size(sglang_args: Sequence[str]) -> int | None:
    """Tokens of a prefill chunk: the value of --sglang-chunked-prefill-size, if it is given; below 1,
    prompts are not cut. Raises ConfigError for a value that is no number.
    """
    names, remedy = ("--chunked-prefill-size",), "Give a number of tokens, such as 8192."
    return _value(sglang_args, names, int, remedy)[1]


def _count(sglang_args: Sequence[str], names: tuple[str, ...], remedy: str) -> int | None:
    flag, count = _value(sglang_args, names, int, remedy)
    if count is not None and count < 1:
        raise ConfigError(f"{flag}={count}: must be at least 1. Leave it out for SGLang's own.")
    return count


def memory_fraction(sglang_args: Sequence[str]) -> float | None:
    """The value of --sglang-mem-fraction-static, None if it is not given.

    Raises ConfigError for a value that is no share of a GPU.
    """
    remedy = "Give a share of a GPU, such as 0.4."
    flag, fraction = _value(sglang_args, ("--mem-fraction-static",), float, remedy)
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError(
            f"{flag}={fraction}: must be above 0 and below 1, a share of a GPU's memory. Give one, such "
            "as 0.4."
        )
    return fraction


def _value(
    sglang_args: Sequence[str], names: tuple[str, ...], kind: type[N], remedy: str
) -> tuple[str, N | None]:
    """The flag as a user writes it, and what is given for it under any of its names in SGLang."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(*names, type=kind, dest="value")
    flag = PREFIX + names[0].removeprefix("--")
    try:
        return flag, parser.parse_known_args(sglang_args)[0].value
    except argparse.ArgumentError as error:
        raise ConfigError(f"{flag}: {error.message}. {remedy}") from error


def validate(sglang_args: Sequence[str], aligned_by: str) -> None:
    """Refuse flags that onpolicy sets itself, and those that break a contract of aligned operators.

    aligned_by: the flag that asks for such a contract; empty: there is none.
    """
    for arg in sglang_args:
        if aligned_by and _COMPILED_GRAPH in arg:
            raise ConfigError(
                f"{arg} after {PREFIX}*: no {_COMPILED_GRAPH} with {aligned_by}, because "
                f"{_COMPILED}. Choose another backend, or run without {aligned_by}."
            )
        name = arg.removeprefix("--").split("=")[0]
        if not arg.startswith("--"):
            continue
        if name in _OURS:
            raise ConfigError(
                f"{PREFIX}{name}: both engines must agree on it, so onpolicy sets it. Use {_OURS[name]}."
            )
        if aligned_by and (reason := _UNALIGNED.get(name)):
            raise ConfigError(
                f"{PREFIX}{name}: not with {aligned_by}, because {reason}. Leave it out, or run "
                f"without {aligned_by}."
            )
