"""Saves on a disk of a few megabytes until it is full. Run by test_write.py."""

import sys
from pathlib import Path

from onpolicy.errors import CheckpointError
from onpolicy.run import saving
from tests.support.unstarted_run import PROMPTS, make_run, state_after

config, engines = make_run(Path(sys.argv[1]), Path(sys.argv[2]), keep_checkpoints=int(sys.argv[3]))
try:
    for done in (2, 4, 6, 8):
        saving.save(config, engines, state_after(done))
except CheckpointError as error:
    print(error)
print("resumes after", saving.find(config, PROMPTS).state.rollouts_done)
