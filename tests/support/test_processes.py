"""What tests start ends with them, also when they are killed."""

import os
import subprocess
import sys

import psutil
import pytest

from tests.support.processes import command_line, is_gone, trainer_ranks, variables
from tests.support.train_runs import ROOT, wait_for

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""
CHILD = """
import sys, time
sys.path.insert(0, {tests!r})
{ends}
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_ends_with_the_one_that_started_it_if_it_asks_to(ends):
    asks = "from tests.support.processes import end_with_parent; end_with_parent()" if ends else ""
    code = CHILD.format(tests=str(ROOT), ends=asks)
    command = [sys.executable, "-c", PARENT, code]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    if ends:
        wait_for(lambda: is_gone(child))
    else:
        assert not is_gone(child)
        child.kill()


def test_a_process_that_has_ended_and_was_not_waited_for_has_no_command_and_is_no_rank():
    ended = subprocess.Popen(["true", "TrainerRank"])
    process = psutil.Process(ended.pid)
    wait_for(lambda: is_gone(process))
    with pytest.raises(psutil.ZombieProcess):
        process.cmdline()
    assert command_line(process) == "" and trainer_ranks(os.getpid()) == []
    assert variables(process) == {}
    ended.wait()
    assert command_line(process) == "" and variables(process) == {}
