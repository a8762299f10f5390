"""Checkpoints on disk: complete or not there."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from unstarted_run import make_run, state_after

from onpolicy import saving
from onpolicy.errors import ConfigError

TESTS = Path(__file__).parents[1]


def test_a_full_disk_at_save_keeps_the_earlier_checkpoint_and_says_what_to_do(checkpoint, tmp_path):
    done = subprocess.run(
        [sys.executable, str(TESTS / "onpolicy/full_disk.py"), str(checkpoint), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    message = r"4 could not be written \(.+\)\. The latest .*step_000002\. Free .*--load"
    assert len(re.findall(message, done.stdout)) == 3, done.stdout
    assert done.stdout.endswith("resumes after 2\nwith space, saves 4\n")


def test_a_resumed_run_keeps_its_seed_and_its_state(checkpoint, tmp_path):
    config, engines = make_run(checkpoint, tmp_path)
    saving.save(config, engines, state_after(2))
    assert saving.find(config).state == state_after(2)
    with pytest.raises(ConfigError, match=r"--seed=1: .* was made with --seed=0"):
        saving.find(dataclasses.replace(config, seed=1))
