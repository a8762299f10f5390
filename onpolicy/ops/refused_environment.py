"""Environment variables that an aligned run, or a server that onpolicy starts, refuses.

They would select other kernels or precisions behind the operators, or replace the server. Some are
read by SGLang, some by CUDA's libraries under it and under the trainer, none by onpolicy, so
nothing else would notice them. They are refused before anything starts; a server inherits the
environment that was checked.
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
    "PYTORCH_TUNABLEOP_ENABLED": (_ON, "it chooses the kernels of products by their speed"),
    "CUBLAS_EMULATE_SINGLE_PRECISION": (_ON, "it computes float32 products from bfloat16 ones"),
}
"""Variable: (values that break an aligned contract, why)."""

_ANOTHER_SERVER = (
    "another server would answer, which knows neither the keys of a run nor its rules for requests"
)

_REPLACING: dict[str, tuple[frozenset[str] | None, str]] = {
    "SGLANG_RUST_SERVER": (_ON, _ANOTHER_SERVER),
    "SGLANG_HTTP_SERVER_APP_PATH": (None, _ANOTHER_SERVER),
    "SGLANG_GRPC_PORT": (None, "it opens a second server beside, which asks nobody for a key"),
    "SGLANG_TEST_SCRIPTED_RUNTIME": (_ON, "a script would take the place of the scheduler"),
    "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": (
        _ON,
        "headers would change a request after its body has been looked at",
    ),
    "SGLANG_EXPOSE_OWN_ENV_VARS": (_ON, "the server would show its environment to its clients"),
    "SGLANG_SIMULATE_ACC_LEN": (None, "tokens would be accepted that nobody has sampled"),
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": (_ON, "tokens would go to other experts than the model's"),
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": (
        _ON,
        "tokens would go to other experts than the model's",
    ),
}
"""SGLang's variables: (values that replace a part of the server, None: any value that is not off;
why)."""

OWN_PLUGIN = "onpolicy"


def require_ours(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for the first variable that would replace or change onpolicy's SGLang server.

    It holds for stock and aligned servers.
    """
    for name, (values, reason) in _REPLACING.items():
        value = environment.get(name, "").strip()
        is_off = value.lower() in _OFF or value.startswith("-")
        if value and (value.lower() in values if values else not is_off):
            raise ConfigError(
                f"{name}={value}: not with a server of onpolicy's: {reason}. Unset it."
            )
    plugins = environment.get("SGLANG_PLUGINS", "")
    if plugins and OWN_PLUGIN not in map(str.strip, plugins.split(",")):
        raise ConfigError(
            f"SGLANG_PLUGINS={plugins}: leaves out the plug-in {OWN_PLUGIN!r}, in which the rules for a "
            "server are. Name it too, or unset the variable."
        )


def require_exact(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for the first variable under which the engines would not agree."""
    for name, (values, reason) in _BREAKING.items():
        value = environment.get(name, "")
        if value.strip().lower() in values:
            raise ConfigError(
                f"{name}={value}: not with --true-on-policy-mode, because {reason}. Unset it, or run "
                "without --true-on-policy-mode."
            )
