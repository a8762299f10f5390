"""Runs under `--operators portable`, by the hashes that they had on other machines."""

import platform

import pytest

from tests.support.golden import RUNS, expected, golden_run
from tests.support.instruction_sets import intel_kernels

pytestmark = [
    pytest.mark.engine,
    pytest.mark.runs,
    pytest.mark.anew,  # its libraries are to choose their kernels themselves
    pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels of x86-64"),
]


@pytest.fixture(autouse=True)
def _kernels_of_no_test(monkeypatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_hash_of_every_other_machine(name, tmp_path):
    assert golden_run(name, tmp_path) == expected()["runs"][name]


def test_it_has_it_where_mkl_takes_the_processor_for_one_of_intels(tmp_path):
    found = golden_run("dense", tmp_path, "--cpu-threads", "2", **intel_kernels(str(tmp_path)))
    assert found == expected()["runs"]["dense"]
