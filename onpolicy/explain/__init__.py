"""From two recordings to the operator that made them differ."""
