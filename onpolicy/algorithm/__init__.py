"""The mathematics of policy optimisation: advantages, objectives, KL penalties, aggregation. Torch
only."""
