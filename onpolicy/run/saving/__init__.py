"""Checkpoints of a run: complete or not there at all, and resumable to the same bits.

A checkpoint is a directory `step_000010` under --save, named after the rollouts done. It is written
under another name and renamed when everything is on disk, so a kill at any moment leaves the last
complete one usable.

    step_000010/
      state.json    rollouts done (the position in the data), run hash, totals, the state of the
                    governor and of the learning rate, configuration, versions, and a digest of every
                    other file and of itself
      rollouts.json what was drawn and not trained on yet, and the position in the prompts
      sharded/      torch DCP: weights, AdamW moments, random state; numbers.json beside it
      hf/           the policy as a Hugging Face checkpoint
      critic/       with --advantage-estimator gae: sharded/, and hf/, a token classifier of transformers

Only directories of exactly such a name are looked at. Nothing is loaded from one before all its
files have been found to be the bytes that were written.
"""

from onpolicy.run.saving.best import better
from onpolicy.run.saving.checkpoint import Best, Checkpoint, RunState, digest_prompts, digest_sets
from onpolicy.run.saving.resume import find, take_over
from onpolicy.run.saving.room import require_room
from onpolicy.run.saving.write import save

__all__ = [
    "Best", "Checkpoint", "RunState", "better", "digest_prompts", "digest_sets", "find",
    "require_room", "save", "take_over",
]  # fmt: skip
