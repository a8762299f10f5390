"""Flags given as --sglang-*: SGLang's own, passed through, less those that a contract decides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from onpolicy.errors import ConfigError

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
}

_UNALIGNED = {
    "attention-backend": "the attention operator is part of the contract",
    "prefill-attention-backend": "the attention operator is part of the contract",
    "decode-attention-backend": "the attention operator is part of the contract",
    "sampling-backend": "the sampler is part of the contract",
    "model-impl": "both engines run the Hugging Face model definition",
    "kv-cache-dtype": "cached keys and values must keep the bits that training computes",
    "quantization": "the engine must hold the weights that are trained, bit for bit",
    "torchao-config": "the engine must hold the weights that are trained, bit for bit",
    "speculative-algorithm": "accepted draft tokens are not samples of softmax(logits / temperature)",
    "speculative-draft-model-path": "draft models are not part of the contract",
    "enable-lora": "adapters are not part of the model that is trained",
    "lora-paths": "adapters are not part of the model that is trained",
    "enable-torch-compile": "compiled operators round differently from the aligned ones",
    "enable-fp32-lm-head": "the output projection is part of the contract",
    "rl-on-policy-target": "the contract's operators take its place",
}


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate --sglang-* flags and their values from the rest: (rest, SGLang's arguments)."""
    rest: list[str] = []
    sglang: list[str] = []
    target = rest
    for arg in argv:
        if arg.startswith(PREFIX):
            target = sglang
            target.append("--" + arg[len(PREFIX) :])
        elif arg.startswith("--"):
            target = rest
            target.append(arg)
        else:
            target.append(arg)
    return rest, sglang


def tensor_parallel_size(sglang_args: Sequence[str]) -> int:
    """Devices of one server: the value of --sglang-tp-size, 1 if it is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=1)
    return parser.parse_known_args(sglang_args)[0].tp_size


def validate(sglang_args: Sequence[str], aligned: bool) -> None:
    """Refuse flags that onpolicy sets itself, and in an aligned run those that break the contract."""
    for arg in sglang_args:
        name = arg.removeprefix("--").split("=")[0]
        if not arg.startswith("--"):
            continue
        if name in _OURS:
            raise ConfigError(
                f"{PREFIX}{name}: both engines must agree on it, so onpolicy sets it. Use {_OURS[name]}."
            )
        if aligned and (reason := _UNALIGNED.get(name)):
            raise ConfigError(
                f"{PREFIX}{name}: not with --true-on-policy-mode, because {reason}. Leave it out, or "
                "run without --true-on-policy-mode."
            )
