"""The flags --sglang-*: SGLang's own flags, passed through, except those that a contract decides."""

import argparse
from collections.abc import Sequence
from typing import TypeVar

from onpolicy.config import secrets
from onpolicy.errors import ConfigError

N = TypeVar("N", int, float, str)

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

_COMPILED = "compiled operators round differently from the aligned ones"

_BREAKS_A_CONTRACT = {
    "the attention operator is part of the contract":
        "attention-backend prefill-attention-backend decode-attention-backend "
        "enable-lean-attention",
    "the attention operator reads pages of one token": "page-size",
    "matrix products are part of the contract": "bf16-gemm-backend",
    "it rounds float32 products to TF32, rotary angles among them": "enable-tf32-matmul",
    "norms and rotary embeddings are part of the contract": "enable-fused-qk-norm-rope",
    "a kernel of whole layers takes the place of the operators in the contract":
        "enable-amd-monokernel enable-nvidia-megakernel monokernel-backend",
    "the sampler is part of the contract": "sampling-backend",
    "both engines compile grammars by xgrammar, in one way":
        "grammar-backend enable-strict-thinking constrained-json-whitespace-pattern "
        "constrained-json-disable-any-whitespace constrained-json-max-whitespace-cnt",
    "tokens are sampled from softmax(logits / temperature) alone":
        "enable-custom-logit-processor enable-watermark watermark-config",
    "both engines run the Hugging Face model definition": "model-impl",
    "both engines run the model that the checkpoint describes": "json-model-override-args",
    "cached keys and values must keep the bits that training computes": "kv-cache-dtype",
    "states of recurrent layers must keep their bits, and lie where the operators write them":
        "mamba-ssm-dtype mamba-radix-cache-strategy enable-mamba-cache-stochastic-rounding "
        "enable-int8-mamba-checkpoint enable-linear-replayssm enable-linear-replayssm-spec "
        "enable-unified-memory",
    "the engine must hold the weights that are trained, bit for bit":
        "quantization torchao-config modelopt-quant quantize-and-serve rl-quant-profile",
    "adapters are not part of the model that is trained": "enable-lora lora-paths",
    _COMPILED:
        "enable-torch-compile cuda-graph-tc-compiler piecewise-cuda-graph-compiler "
        "enforce-piecewise-cuda-graph",
    "the order of sums over ranks is part of the contract":
        "enable-flashinfer-allreduce-fusion flashinfer-allreduce-fusion-backend "
        "enable-aiter-allreduce-fusion enable-fused-moe-sum-all-reduce enable-mscclpp "
        "enable-torch-symm-mem enable-layernorm-sp dcp-size decode-context-parallel-size "
        "attn-cp-size attention-context-parallel-size enable-kv-cache-sharding",
    "it rounds what tensor-parallel ranks tell each other": "enable-quant-communications",
    "the output projection is part of the contract": "enable-fp32-lm-head",
    "the contract knows one way to share a model: tensor parallelism":
        "enable-dp-attention attn-dp-size attention-data-parallel-size",
    "the contract's operators take its place": "rl-on-policy-target",
}  # fmt: skip
"""Flags by the reason why they are not for aligned operators."""

_UNALIGNED = {flag: why for why, flags in _BREAKS_A_CONTRACT.items() for flag in flags.split()}

_KEYLESS = ("tokenizer-worker-num", "grpc-mode", "smg-grpc-mode", "grpc-port")
"""Flags by which SGLang listens where it asks for no key (`http_server._setup_and_run_http_server`)."""

TENSOR_PARALLEL = ("--tp-size", "--tensor-parallel-size", "--tp")

_SPECULATIVE = "speculative-"
"""What SGLang's flags of engines that draft begin with."""

_DRAFTS = "SGLang takes a drafted token by its probability, and not because its seed draws it"

_COMPILED_GRAPH = "tc_piecewise"
"""A kind of CUDA graph, given to --cuda-graph-backend-prefill or inside --cuda-graph-config."""


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate --sglang-* flags (with - or _) and their values from the rest: (rest, SGLang's)."""
    rest: list[str] = []
    sglang: list[str] = []
    target = rest
    for arg in argv:
        given, (name, equals, value) = arg, arg.partition("=")
        if (flag := name.replace("_", "-")).startswith(PREFIX):
            target, given = sglang, "--" + flag[len(PREFIX) :] + equals + value
        elif arg.startswith("--"):
            target = rest
        target.append(given)
    return rest, sglang


def tensor_parallel_size(sglang_args: Sequence[str]) -> int:
    """Return the devices of one server, 1 by default. Raises ConfigError for an invalid number."""
    return _count(sglang_args, TENSOR_PARALLEL, "Give a number of devices, such as 2.") or 1


def max_total_tokens(sglang_args: Sequence[str]) -> int | None:
    """Return the tokens of the KV cache, if --sglang-max-total-tokens is given."""
    return _count(sglang_args, ("--max-total-tokens",), "Give a number of tokens, such as 16384.")


def context_length(sglang_args: Sequence[str]) -> int | None:
    """Return the most tokens of a sequence, if --sglang-context-length is given."""
    return _count(sglang_args, ("--context-length",), "Give a number of tokens, such as 4096.")


def memory_fraction(sglang_args: Sequence[str]) -> float | None:
    """Return the fraction of a GPU's memory for a server, if --sglang-mem-fraction-static is given."""
    remedy = "Give a share of a GPU, such as 0.4."
    flag, fraction = _value(sglang_args, ("--mem-fraction-static",), float, remedy)
    if fraction is not None and not 0 < fraction < 1:
        rule = "must be above 0 and below 1, a share of a GPU's memory. Give one, such as 0.4."
        raise ConfigError(f"{flag}={fraction}: {rule}")
    return fraction


def chunked_prefill_size(sglang_args: Sequence[str]) -> int | None:
    """Return the tokens of a prefill chunk, if --sglang-chunked-prefill-size is given; below 1 there are
    no chunks. Raises ConfigError for an invalid number."""
    names, remedy = ("--chunked-prefill-size",), "Give a number of tokens, such as 8192."
    return _value(sglang_args, names, int, remedy)[1]


def _count(sglang_args: Sequence[str], names: tuple[str, ...], remedy: str) -> int | None:
    flag, count = _value(sglang_args, names, int, remedy)
    if count is not None and count < 1:
        raise ConfigError(f"{flag}={count}: must be at least 1. Leave it out for SGLang's own.")
    return count


def _value(
    sglang_args: Sequence[str], names: tuple[str, ...], kind: type[N], remedy: str
) -> tuple[str, N | None]:
    """Return a flag as a user writes it, and its value under any of its names in SGLang."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(*names, type=kind, dest="value")
    flag = PREFIX + names[0].removeprefix("--")
    try:
        return flag, parser.parse_known_args(sglang_args)[0].value
    except argparse.ArgumentError as error:
        raise ConfigError(f"{flag}: {error.message}. {remedy}") from error


def validate(sglang_args: Sequence[str], aligned_by: str) -> None:
    """Raise ConfigError for flags that onpolicy sets itself, flags that break an aligned contract,
    and secrets in unreadable files. aligned_by: what asks for aligned operators, or ""."""
    memory_fraction(sglang_args)
    for flag, value in secrets.split(sglang_args)[1].items():
        secrets.reveal(f"{PREFIX}{flag[2:]}", value)
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
        if name in _KEYLESS:
            raise ConfigError(
                f"{PREFIX}{name}: SGLang asks for no key then, and whoever reaches the server could "
                "change its weights. Leave it out."
            )
        reason = _DRAFTS if name.startswith(_SPECULATIVE) else _UNALIGNED.get(name)
        if aligned_by and reason:
            raise ConfigError(
                f"{PREFIX}{name}: not with {aligned_by}, because {reason}. Leave it out, or run "
                f"without {aligned_by}."
            )
