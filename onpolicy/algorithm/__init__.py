"""The mathematics of policy optimisation, in torch alone: advantages, objectives, KL penalties,
aggregation."""
