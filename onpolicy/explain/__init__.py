"""Which operator makes the two engines differ: both are recorded, and compared to where they part.

Nothing else knows of this room, which stands on what engines offer to anyone: `Trainer.on_each_rank`,
`ShardedModel.around_operators` and the extensions of a server (`sglang_patches/extensions.py`).
"""
