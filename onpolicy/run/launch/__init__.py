"""What a command needs before anything starts: the contract that its engines keep (`contracts`), what
they are started with (`engine_specs`) and where (`host_shares`, `cluster_engines`), whether they fit
(`process_memory`, `memory_checks`, `colocation`, `host_memory`), and all that a run reads (`inputs`)."""
