"""Outputs of a run: progress, metrics, records, and its hash."""
