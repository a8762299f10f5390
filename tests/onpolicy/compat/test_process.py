"""What a process that computes asks of torch's libraries, wherever it starts."""

import os
import subprocess
import sys

import pytest
import torch

from onpolicy.errors import ContractError
from onpolicy.ops.checks.probe import require_equal

PRODUCT = """
from onpolicy.compat.process import prepare_process
prepare_process()
import torch
with torch.backends.mkl.verbose(1):
    torch.ones(64, 64) @ torch.ones(64, 64)
"""
VARIABLES = ("MKL_CBWR", "OMP_WAIT_POLICY")
SHOW = f"import os; print([os.environ.get(name) for name in {VARIABLES}])"
STARTS = {
    "the command line": """
import contextlib
from onpolicy.cli.main import main
with contextlib.suppress(SystemExit):
    main(["report", "--help"])
""",
    "a server": """
from sglang_patches import serve
serve.serve = lambda argv: None
serve.main([])
""",
}


def run(code, **variables):
    """What the code prints where nobody asked for anything but `variables`."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch was built without MKL")
@pytest.mark.parametrize("asked", ["", "COMPATIBLE"])
def test_strict_sums_are_in_force_from_the_first_product_on(asked):
    said = run(PRODUCT, **({"MKL_CBWR": asked} if asked else {}))
    assert f"CNR:{asked or 'AUTO,STRICT'} " in said, said


@pytest.mark.parametrize("start", STARTS)
def test_a_process_is_prepared_where_it_starts(start):
    code = STARTS[start] + SHOW
    assert run(code).splitlines()[-1] == "['AUTO,STRICT', 'PASSIVE']"
    kept = run(code, MKL_CBWR="AVX2", OMP_WAIT_POLICY="ACTIVE").splitlines()[-1]
    assert kept == "['AVX2', 'ACTIVE']"


def test_an_import_prepares_nothing():
    assert run(f"import onpolicy, onpolicy.compat.process\n{SHOW}") == "[None, None]\n"


def test_these_tests_are_prepared():
    assert all(os.environ.get(name) for name in VARIABLES)


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        (None, r"MKL_CBWR is not set: let the process begin with .*prepare_process\(\)"),
        ("COMPATIBLE", r"MKL_CBWR=COMPATIBLE: unset it"),
        ("AUTO,STRICT", "Run without --true-on-policy-mode here"),
    ],
)
def test_a_self_check_that_fails_says_what_to_do_about_the_mode(monkeypatch, asked, remedy):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    if asked is not None:
        monkeypatch.setenv("MKL_CBWR", asked)
    with pytest.raises(ContractError, match=remedy):
        require_equal("linear", (3, 4), "1 rows", torch.zeros(1), torch.ones(1))


def test_transformers_models_can_be_imported_without_onpolicy(tmp_path):
    """As a user's own script does: no path and no variable of ours."""
    code = (
        "import sys; from transformers import AutoModelForCausalLM, Qwen3ForCausalLM\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'onpolicy'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
