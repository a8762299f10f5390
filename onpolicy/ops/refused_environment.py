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
        "it asks for matrix products that depend on the batch"
    ),
    "SGLANG_ENABLE_TORCH_COMPILE": "compiled operators round differently from aligned ones",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": (
        "it asks for log-probabilities of another temperature than tokens are sampled with"
    ),
    "SGLANG_USE_SGL_FA3_KERNEL": (
        "it fetches another build of FlashAttention-3 than the one the trainer calls"
    ),
    "NVIDIA_TF32_OVERRIDE": "it rounds float32 products to TF32, rotary angles among them",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "it rounds float32 products to TF32, rotary angles among them",
    "PYTORCH_TUNABLEOP_ENABLED": "it chooses the kernels of products by their speed",
    "CUBLAS_EMULATE_SINGLE_PRECISION": "it computes float32 products from bfloat16 ones",
}
"""Variables that break an aligned contract if they are on, and why."""

_BREAKING_IF_OFF = {"SGLANG_USE_SGL_FA3_KERNEL"}
"""Those of them that break it if they are off."""

_ANOTHER_SERVER = (
    "another server would answer, which knows neither the keys of a run nor its rules for requests"
)

_OTHER_EXPERTS = "tokens would go to other experts than the model's"

_REPLACING = {
    "SGLANG_RUST_SERVER": _ANOTHER_SERVER,
    "SGLANG_HTTP_SERVER_APP_PATH": _ANOTHER_SERVER,
    "SGLANG_GRPC_PORT": "it opens a second server beside, which asks nobody for a key",
    "SGLANG_TEST_SCRIPTED_RUNTIME": "a script would take the place of the scheduler",
    "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": (
        "headers would change a request after its body has been looked at"
    ),
    "SGLANG_EXPOSE_OWN_ENV_VARS": "the server would show its environment to its clients",
    "SGLANG_SIMULATE_ACC_LEN": "tokens would be accepted that nobody has sampled",
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": _OTHER_EXPERTS,
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": _OTHER_EXPERTS,
}
"""SGLang's variables that replace a part of the server if they are on, and why."""

_WITH_VALUES = {"SGLANG_HTTP_SERVER_APP_PATH", "SGLANG_GRPC_PORT", "SGLANG_SIMULATE_ACC_LEN"}
"""Those of them that do so with any value that is not off."""

OWN_PLUGIN = "onpolicy"


def require_ours(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for the first variable that would replace or change onpolicy's SGLang server.

    It holds for stock and aligned servers.
    """
    for name, reason in _REPLACING.items():
        value = environment.get(name, "").strip()
        is_off = value.lower() in _OFF or value.startswith("-")
        if value and (not is_off if name in _WITH_VALUES else value.lower() in _ON):
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
    for name, reason in _BREAKING.items():
        value = environment.get(name, "")
        if value.strip().lower() in (_OFF if name in _BREAKING_IF_OFF else _ON):
            raise ConfigError(
                f"{name}={value}: not with --true-on-policy-mode, because {reason}. Unset it, or run "
                "without --true-on-policy-mode."
            )
