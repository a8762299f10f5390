"""Whole runs as a user starts them, in processes that need not import everything anew."""

import functools

import pytest

from tests.support.browser import start_browser
from tests.support.forked_processes import forked_processes
from tests.support.train_runs import start_train, write_prompts


@pytest.fixture(scope="module", autouse=True)
def _fork_processes():
    with forked_processes():
        yield


@pytest.fixture(autouse=True)
def _start_processes_anew(request):
    with forked_processes(request.node.get_closest_marker("anew") is None):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("data") / "prompts.jsonl")


@pytest.fixture(scope="module")
def start(checkpoint, data):
    """Starts `onpolicy train`; see `start_train`. None outlives the tests of a file."""
    started = []

    @functools.wraps(start_train)
    def start_run(*args, **options):
        started.append(start_train(checkpoint, data, *args, **options))
        return started[-1]

    yield start_run
    for process in started:
        process.kill()


@pytest.fixture(scope="module")
def browser():
    """A Chromium for the tests of a file."""
    chromium = start_browser()
    yield chromium
    chromium.quit()
