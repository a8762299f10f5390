"""The maths of policy optimisation: advantages, objectives, KL penalties, aggregation. Torch only."""
