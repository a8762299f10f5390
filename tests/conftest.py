"""Fixtures shared by all tests."""

# ruff: noqa: E402
from onpolicy.compat.process import prepare_process

prepare_process()  # before torch is imported

import atexit
import gc
import importlib
import logging
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported

import tests.support.quick_disk
import tests.support.quick_parsing
import tests.support.triton_interpreter  # noqa: F401 (before anything imports Triton)
from onpolicy.compat.process import collect_rarely
from onpolicy.contract import VARIABLES
from tests.support.further import mark as mark_further

collect_rarely()  # thousands of tests are objects that stay

# Where a shell has started the tests behind its back, commands that they interrupt would not notice.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Deterministic, and never a failure because a shared machine is slow.
settings.register_profile("onpolicy", deadline=None, derandomize=True, max_examples=80)
settings.register_profile("few", settings.get_profile("onpolicy"), max_examples=15)
settings.load_profile("onpolicy")


def pytest_configure(config):
    """Give all processes of a session a temporary directory that goes with it, whatever they leave.

    Its path is short, since sockets stand there. What `tmp_path` keeps for a look stays outside.
    """
    if not hasattr(config, "workerinput"):  # workers inherit it
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="t")
        tempfile.tempdir = None  # read anew
        # After multiprocessing's own end, which removes a directory inside.
        atexit.unregister(multiprocessing.util._exit_function)
        atexit.register(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)
        atexit.register(multiprocessing.util._exit_function)


def pytest_ignore_collect(collection_path, config):
    """`-m runs` and `-m kernels` import the files that have such tests, and no other."""
    marker = config.option.markexpr.partition(" ")[0]
    is_left_out = marker in ("runs", "kernels") and collection_path.suffix == ".py"
    return True if is_left_out and f"mark.{marker}" not in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves tests out
def pytest_collection_modifyitems(config, items):
    """What takes long, as servers do, comes first, so that all workers end together."""
    mark_further(config, items)
    longest = ("engine", "long", "runs")
    items.sort(key=lambda item: not any(map(item.get_closest_marker, longest)))


def pytest_collection_finish():
    """Tests that make trainers check operators once. What has been imported and collected stays: no
    search for garbage walks through it again."""
    if "onpolicy.training.policy_trainer" in sys.modules:
        importlib.import_module("tests.support.checked_once")
    gc.freeze()


@pytest.fixture(autouse=True)
def _log_levels_of_a_fresh_process():
    """Ray sets them, and so do commands that tests and fixtures call in their own process."""
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("onpolicy").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _kernels_as_before():
    """A command with `--operators portable` asks for its own in this process's environment."""
    before = {name: os.environ.get(name) for asked in VARIABLES.values() for name in asked}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A tiny untied Qwen3."""
    from tests.support.tiny import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("qwen3"))


pytest_plugins = ["tests.support.engines_fixture"]
