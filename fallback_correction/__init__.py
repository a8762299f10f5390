"""Corrections for reinforcement learning whose rollout engine is not aligned with the trainer.

Imports torch and the standard library alone. Begin with `tokens.TokenBatch`, `config.CorrectionConfig`
and `correction.correct`; `adapters` has drop-ins for Miles, slime and verl.
"""
