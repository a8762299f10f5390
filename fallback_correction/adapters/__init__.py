"""The corrections under the names, keys and calling conventions of other RL frameworks."""
