"""Saves where the system refuses files over some bytes, as a full disk would. Run by test_write.py.

In a process of its own: the limit holds for everything that a process writes.
"""

import resource
import sys
from pathlib import Path

from onpolicy.errors import CheckpointError
from onpolicy.run import saving
from tests.support.unstarted_run import EVALUATIONS, PROMPTS, make_run, state_after


def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def then_limit(function, size):
    def call(*args):
        function(*args)
        limit(size)

    return call


config, engines = make_run(Path(sys.argv[1]), Path(sys.argv[2]))
saving.save(config, engines, state_after(2))
trainer = engines.trainer
save_trainer, export = trainer.save, trainer.export


def fail():
    try:
        saving.save(config, engines, state_after(4))
    except CheckpointError as error:
        print(error)
    limit(resource.RLIM_INFINITY)
    trainer.save, trainer.export = save_trainer, export


for size in (100, 30_000, 450_000):  # in DCP's index, or its tensors
    limit(size)
    fail()
for size in (100, 450_000):  # in the configuration, or the exported weights
    trainer.save = then_limit(save_trainer, size)
    fail()
trainer.export = then_limit(export, 1000)  # in the record
fail()

print(sorted(path.name for path in Path(config.output.save).iterdir() if path.name != ".lock"))
trainer.load(saving.find(config, PROMPTS, EVALUATIONS).directory)
print("resumes after", saving.find(config, PROMPTS, EVALUATIONS).state.rollouts_done)
saving.save(config, engines, state_after(4))
print("with space, saves", saving.find(config, PROMPTS, EVALUATIONS).state.rollouts_done)
