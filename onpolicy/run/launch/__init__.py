"""The preparation of a command, before anything starts.

The contract of its engines (`contracts`), their specs (`engine_specs`) and places (`host_shares`,
`cluster_engines`), memory checks (`process_memory`, `memory_model`, `memory_checks`), and everything
that a run reads (`inputs`).
"""
