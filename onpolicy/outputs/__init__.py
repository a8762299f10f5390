"""Outputs of a run: progress, metrics, plots, records, and its hash."""
