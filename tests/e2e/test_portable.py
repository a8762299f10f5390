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


INTEL = "dense on Megatron"
"""The run in which MKL takes the processor for one of Intel's."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_hash_of_every_other_machine(name, tmp_path):
    more, kernels = (), {}
    if name == INTEL:
        more, kernels = ("--cpu-threads", "2"), intel_kernels(str(tmp_path))
    assert golden_run(name, tmp_path, *more, **kernels) == expected()["runs"][name]
