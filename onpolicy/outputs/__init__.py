"""What a run shows and leaves behind: progress, metrics, plots, records, and its hash."""
