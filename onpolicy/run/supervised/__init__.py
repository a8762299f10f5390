"""The command `onpolicy sft`.

Rows become trajectories whose answers are learnt (`answers`), everything is checked before anything
starts (`inputs`), and a trainer without engines takes the optimizer steps (`run`).
"""
