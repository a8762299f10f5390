"""The runner of `make test-cpus` notices a setting that no library took."""

import platform
from pathlib import Path

import pytest

from tests.support.instruction_sets import ROOT, SETTINGS, TESTS, Setting, run

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="settings of x86 libraries")


def test_a_setting_that_is_not_in_force_is_a_failure(tmp_path):
    problem = run(Setting("ATEN_CPU_CAPABILITY=avx2", says="ATen AVX9"), str(tmp_path))
    assert "not in force: 'ATen AVX9' is not in\nATen AVX2\n" in problem


def test_every_setting_says_how_it_is_known_to_be_in_force():
    assert all(setting.says for setting in SETTINGS)


def test_what_is_run_exists():
    for test in TESTS:
        path = test.removeprefix("--ignore=").partition("::")[0]
        assert test.startswith("-k=") or Path(ROOT, path).exists()
