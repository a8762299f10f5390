"""`onpolicy serve` as a user starts it, and what it prints."""

import contextlib
import os
import subprocess
import sys

import pytest


def reached_by(process):
    """(The flags by which a run reaches the servers of `onpolicy serve`, all that it has printed.)"""
    printed = []
    for line in process.stdout:
        printed.append(line)
        if line.startswith("--rollout-server-url"):
            return line.split(), "".join(printed)
    pytest.fail("".join(printed))


@contextlib.contextmanager
def serving(checkpoint, directory, *argv, environment=None):
    """`reached_by` of one server, until it is left; it has `environment` beside ours."""
    command = [sys.executable, "-m", "onpolicy.cli", "serve", "--hf-checkpoint", str(checkpoint)]
    process = subprocess.Popen(
        [*command, "--run-dir", str(directory), "--cpu-threads", "1", *argv],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    try:
        yield reached_by(process)
    finally:
        process.terminate()
        process.wait(30)
