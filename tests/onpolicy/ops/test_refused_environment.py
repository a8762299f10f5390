"""Variables that put other kernels or precisions behind the operators, or another server before them."""

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from onpolicy.errors import ConfigError
from onpolicy.ops.refused_environment import _REPLACING, require_exact, require_ours
from tests.support.train_runs import ROOT


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
        ("PYTORCH_TUNABLEOP_ENABLED", "1"),
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


REPLACING = [
    ("SGLANG_RUST_SERVER", "1"), ("SGLANG_RUST_SERVER", " True"),
    ("SGLANG_HTTP_SERVER_APP_PATH", "other.module:app"), ("SGLANG_GRPC_PORT", "50051"),
    ("SGLANG_TEST_SCRIPTED_RUNTIME", "true"), ("SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", "yes"),
    ("SGLANG_EXPOSE_OWN_ENV_VARS", "on"), ("SGLANG_SIMULATE_ACC_LEN", "2.5"),
    ("SGLANG_SIMULATE_UNIFORM_EXPERTS", "1"), ("SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS", "1"),
    ("SGLANG_PLUGINS", "other"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REPLACING)
def test_a_variable_that_replaces_the_server_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}={value.strip()}: .*[Uu]nset"):
        require_ours({"PATH": "/bin", name: value})


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SGLANG_RUST_SERVER": "0", "SGLANG_EXPOSE_OWN_ENV_VARS": "false"},
        {"SGLANG_SIMULATE_ACC_LEN": "-1", "SGLANG_GRPC_PORT": "", "SGLANG_RUST_SERVER": ""},
        {"SGLANG_PLUGINS": "other, onpolicy"},
    ],
)
def test_a_variable_that_replaces_nothing_is_accepted(environment):
    require_ours(environment)


def test_sglang_has_every_variable_that_is_refused_under_that_name():
    """A name that it has no more would be refused in vain, and another have taken its place."""
    source = Path(find_spec("sglang").submodule_search_locations[0], "srt/environ.py").read_text()
    names = {
        target.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert {name for name, _ in REPLACING} == {*_REPLACING, "SGLANG_PLUGINS"} <= names


def test_a_server_that_is_started_by_itself_asks_too():
    done = subprocess.run(
        [sys.executable, "-m", "sglang_patches.server_process", "--model-path", "x"],
        env={**os.environ, "SGLANG_RUST_SERVER": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode and "ConfigError: SGLANG_RUST_SERVER=1" in done.stderr
