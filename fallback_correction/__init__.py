"""Corrections for rollouts whose engine is not aligned with the trainer. Nothing is here yet."""
