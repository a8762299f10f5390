"""Saves where the system refuses files over some bytes, as a full disk would. Run by test_saving.py.

In a process of its own: the limit holds for everything that a process writes.
"""

import resource
import sys
from pathlib import Path

from unstarted_run import make_run, state_after

from onpolicy import saving
from onpolicy.errors import CheckpointError

config, engines = make_run(Path(sys.argv[1]), Path(sys.argv[2]))
saving.save(config, engines, state_after(2))
for size in (100, 30_000, 450_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        saving.save(config, engines, state_after(4))
    except CheckpointError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
engines.trainer.load(saving.find(config).directory)
print("resumes after", saving.find(config).state.rollouts_done)
saving.save(config, engines, state_after(4))
print("with space, saves", saving.find(config).state.rollouts_done)
