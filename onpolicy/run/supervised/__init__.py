"""The command `onpolicy sft`: rows become trajectories whose answers are learnt (`answers`), and a
trainer without engines takes the optimizer steps (`supervised_run`)."""
