"""How the processes of a CPU server start."""

import multiprocessing
from types import SimpleNamespace

import pytest

from sglang_patches import forks


@pytest.fixture
def spawns():
    """SGLang's choice, just before ours."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize(("dp_size", "method"), [(1, "fork"), (2, "spawn")])
def test_they_are_forked_unless_threads_start_them(spawns, dp_size, method):
    forks._fork(None, SimpleNamespace(dp_size=dp_size))
    assert multiprocessing.get_start_method() == method
