"""Fixtures shared by all tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: tests share their cores

from pathlib import Path

import pytest
from hypothesis import settings

import tests.support.triton_interpreter  # noqa: F401 (before anything imports Triton)
from onpolicy.system.garbage import collect_rarely

collect_rarely()  # thousands of tests are objects that stay

# Deterministic, and never a failure because a shared machine is slow.
settings.register_profile("onpolicy", deadline=None, derandomize=True, max_examples=80)
settings.register_profile("few", settings.get_profile("onpolicy"), max_examples=15)
settings.load_profile("onpolicy")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untied Qwen3."""
    from tests.support.tiny import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("qwen3"))


pytest_plugins = ["tests.support.engines_fixture"]
