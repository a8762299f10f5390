"""Checkpoints of a run: complete or absent, and resumable to the same bits.

A checkpoint is a directory `step_000010` under --save, named after the rollouts done. It is written
under another name and renamed when everything is on disk, so a kill leaves the last complete one usable.

    step_000010/
      state.json    rollouts done (the position in the data), run hash, totals, the state of the
                    governor and of the learning rate, configuration, versions, and a digest of every
                    other file and of itself
      rollouts.json samples that were not trained on yet, and the position in the prompts
      sharded/      torch DCP: weights, AdamW moments, random state; numbers.json beside it
      hf/           the policy as a Hugging Face checkpoint
      critic/       with --advantage-estimator gae: sharded/, and hf/, a token classifier of transformers

Other directories are ignored. The digests of all files are checked before anything is loaded.
"""

from onpolicy.run.saving.checkpoint import (
    Best,
    Checkpoint,
    RunState,
    better,
    digest_prompts,
    digest_sets,
)
from onpolicy.run.saving.resume import find, take_over
from onpolicy.run.saving.write import require_room, save

__all__ = [
    "Best", "Checkpoint", "RunState", "better", "digest_prompts", "digest_sets", "find",
    "require_room", "save", "take_over",
]  # fmt: skip
