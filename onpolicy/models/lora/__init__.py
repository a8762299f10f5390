"""Low-rank adapters: beside a model, in PEFT's format, and merged into its weights."""
