"""Pythons of frameworks that stand beside ours: examples put them into the cache, and no test does."""

import os
from pathlib import Path

import pytest

AGENTS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onpolicy/agents"


def has_python(name):
    return (AGENTS / name / "installed").exists()


def python_of(name):
    """The Python of a framework; without it the test is skipped, and says what puts it there."""
    if not has_python(name):
        pytest.skip(f"{AGENTS / name} is not there; examples/common/own_python.sh puts it there")
    return str(AGENTS / name / "bin/python")
