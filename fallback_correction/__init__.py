"""Corrections for reinforcement learning with a rollout engine that is not aligned with the trainer.

The package imports torch and the standard library alone; `config` and its imports work without torch.
Begin with `tokens.TokenBatch`, `config.CorrectionConfig` and `correction.correct`; `adapters` has
drop-ins for Miles, slime and verl.
"""
