"""The preparation of a command, before anything starts.

The contract of its engines (`contracts`), their specs (`engine_specs`) and places (`cluster_engines`),
the memory of its processes (`memory`), and everything that a run reads (`inputs`).
"""
