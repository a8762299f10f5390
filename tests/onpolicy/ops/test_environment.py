"""Variables that put other kernels or precisions behind the operators."""

import pytest

from onpolicy.errors import ConfigError
from onpolicy.ops.environment import require_exact


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT", "1"),
        ("SGLANG_ENABLE_TORCH_COMPILE", "true"),
        ("SGLANG_RETURN_ORIGINAL_LOGPROB", "True"),
        ("SGLANG_USE_SGL_FA3_KERNEL", "0"),
        ("SGLANG_USE_SGL_FA3_KERNEL", "false"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1"),
        ("CUBLAS_EMULATE_SINGLE_PRECISION", "1"),
    ],
)
def test_a_value_that_breaks_the_contract_is_refused_by_name(name, value):
    with pytest.raises(
        ConfigError, match=rf"^{name}={value}: not with --true-on-policy-mode.*Unset"
    ):
        require_exact({"PATH": "/bin", name: value})


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SGLANG_USE_SGL_FA3_KERNEL": "1"},
        {"NVIDIA_TF32_OVERRIDE": "0", "SGLANG_ENABLE_TORCH_COMPILE": "0"},
        {"SGLANG_RETURN_ORIGINAL_LOGPROB": ""},
    ],
)
def test_a_value_that_changes_nothing_is_accepted(environment):
    require_exact(environment)
