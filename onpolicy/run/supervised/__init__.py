"""`onpolicy sft`: rows become trajectories whose answers are learnt (`answers`), everything is checked
before anything starts (`inputs`), and a trainer alone takes the optimizer steps (`run`)."""
