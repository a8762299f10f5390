"""Search for the operator that makes the two engines differ: both are recorded and compared.

Nothing else depends on this package, which uses public interfaces of the engines:
`Trainer.on_each_rank`, `ShardedModel.around_operators` and the extensions of a server
(`sglang_patches/extensions.py`).
"""
