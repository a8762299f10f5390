"""Saves on a disk of a few megabytes until it is full: keeping all checkpoints, and then one.

Run by test_write.py.
"""

import shutil
import sys
from pathlib import Path

from onpolicy.errors import CheckpointError
from onpolicy.run import saving
from tests.support.unstarted_run import EVALUATIONS, PROMPTS, changed, make_run, state_after

config, engines = make_run(Path(sys.argv[1]), Path(sys.argv[2]))
for kept in (0, 1):
    config = changed(config, keep_checkpoints=kept)
    try:
        for done in (2, 4, 6, 8):
            saving.save(config, engines, state_after(done))
    except CheckpointError as error:
        print(error)
    print(
        f"keeping {kept}: resumes after",
        saving.find(config, PROMPTS, EVALUATIONS).state.rollouts_done,
    )
    shutil.rmtree(config.output.save)
