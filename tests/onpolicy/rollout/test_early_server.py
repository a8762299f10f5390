"""A process that waits for what it is to serve, and who takes it over."""

import json
import os
import signal
import sys

import pytest

from onpolicy.rollout import early_server

SAYS_WHAT_IT_IS_TOLD = "import sys; sys.stdout.write(sys.stdin.readline()); sys.stdout.flush()"
ORDERS = {"flags": ["--port", "1"], "secrets": ["--api-key=k"], "log": "/dev/null"}


@pytest.fixture
def waiting(monkeypatch, tmp_path):
    """Lets a program of the test's own wait; it writes into the file that this is."""
    said = tmp_path / "said"

    def use(program=SAYS_WHAT_IT_IS_TOLD):
        code = f"import os; os.dup2(os.open({str(said)!r}, os.O_WRONLY | os.O_CREAT), 1); {program}"
        monkeypatch.setattr(early_server, "command", lambda *_: [sys.executable, "-c", code])
        return said

    return use


def begun_with(**variables):
    return early_server.begun({**os.environ, **variables})


def taken_over(**variables):
    environment = {**os.environ, early_server.GUARDED: "1", **variables}
    return early_server.take_over(environment, ORDERS)


def test_the_first_server_takes_it_over_and_tells_it_what_it_is_and_the_next_one_does_not(waiting):
    said = waiting()
    with begun_with(A="a"):
        process = taken_over(A="a", ONPOLICY_CONTRACT="c")
        assert process.wait(60) == 0 and taken_over(A="a") is None
    assert json.loads(said.read_text()) == {**ORDERS, "variables": {"ONPOLICY_CONTRACT": "c"}}


@pytest.mark.parametrize("variables", [{"A": "b"}, {}, {"A": "a", "OMP_NUM_THREADS": "99"}])
def test_what_a_library_may_have_read_is_never_changed_beneath_it(waiting, variables):
    said = waiting()
    with begun_with(A="a"):
        process = early_server._waiting[0]
        assert taken_over(**variables) is None
        assert process.poll() is not None
    assert said.read_text() == ""


def test_one_that_has_ended_is_not_taken_over(waiting):
    waiting("raise SystemExit(1)")
    with begun_with():
        early_server._waiting[0].wait(60)
        assert taken_over() is None


@pytest.mark.parametrize("is_stopped", [False, True])
def test_nobody_needs_it_and_it_is_gone(waiting, is_stopped):
    waiting("sys.stdin.readline()".join(["import sys; ", ""]))
    with begun_with():
        process = early_server._waiting[0]
        assert process.poll() is None
        if is_stopped:
            process.send_signal(signal.SIGSTOP)
    assert process.poll() is not None and early_server._waiting is None
