"""The runner of `make test-cpus` notices a setting that no library took."""

import platform
from pathlib import Path

import pytest

from tests.support.instruction_sets import PORTABLE, ROOT, SETTINGS, TESTS, Setting, run

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="settings of x86 libraries")


def test_a_setting_that_is_not_in_force_is_a_failure(tmp_path):
    problem = run(
        Setting("ATEN_CPU_CAPABILITY=avx2", says=("ATen AVX2\n", "ATen AVX9")), str(tmp_path)
    )
    assert "not in force: ['ATen AVX9'] is not in\nATen AVX2\n" in problem


def test_every_setting_says_how_it_is_known_to_be_in_force():
    assert all(len(setting.says) == len(setting.values) == 2 for setting in SETTINGS)


def test_what_is_run_exists():
    for test in TESTS:
        path = test.removeprefix("--ignore=").partition("::")[0]
        assert Path(ROOT, path).exists()


def test_only_settings_of_the_portable_kernels_leave_out_what_replaces_them_by_its_own():
    complete = [s.variables for s in SETTINGS if PORTABLE not in s.selection]
    assert complete == [setting.variables for setting in SETTINGS[1:]]
    assert PORTABLE not in Setting("MKL_CBWR=AVX2 DNNL_MAX_CPU_ISA=SSE41").selection
