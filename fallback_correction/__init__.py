"""Corrections for reinforcement learning whose rollout engine is not aligned with the trainer.

Imports torch and the standard library alone; `config` and what it stands on do without torch too. Begin
with `tokens.TokenBatch`, `config.CorrectionConfig` and `correction.correct`; `adapters` has drop-ins for
Miles, slime and verl.
"""
