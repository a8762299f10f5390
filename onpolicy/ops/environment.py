"""Environment variables that would put other kernels, or other precisions, behind the operators.

Some are read by SGLang, some by CUDA's libraries under it and under the trainer, none by onpolicy,
so nothing else would notice them. They are refused before anything is started; a server inherits
the environment that was checked.
"""

from __future__ import annotations

from collections.abc import Mapping

from onpolicy.errors import ConfigError

_ON = frozenset({"1", "true", "yes", "y", "on"})
_OFF = frozenset({"0", "false", "no", "n", "off"})

_BREAKING = {
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": (
        _ON,
        "it asks for matrix products that depend on the batch",
    ),
    "SGLANG_ENABLE_TORCH_COMPILE": (_ON, "compiled operators round differently from aligned ones"),
    "SGLANG_RETURN_ORIGINAL_LOGPROB": (
        _ON,
        "it asks for log-probabilities of another temperature than tokens are sampled with",
    ),
    "SGLANG_USE_SGL_FA3_KERNEL": (
        _OFF,
        "it fetches another build of FlashAttention-3 than the one the trainer calls",
    ),
    "NVIDIA_TF32_OVERRIDE": (_ON, "it rounds float32 products to TF32, rotary angles among them"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (
        _ON,
        "it rounds float32 products to TF32, rotary angles among them",
    ),
    "CUBLAS_EMULATE_SINGLE_PRECISION": (_ON, "it computes float32 products from bfloat16 ones"),
}
"""Variable: (values that break an aligned contract, why)."""


def require_exact(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for the first variable under which the engines would not agree."""
    for name, (values, reason) in _BREAKING.items():
        value = environment.get(name, "")
        if value.strip().lower() in values:
            raise ConfigError(
                f"{name}={value}: not with --true-on-policy-mode, because {reason}. Unset it, or run "
                "without --true-on-policy-mode."
            )
