"""The work of every command that starts engines.

Before: the contract that all engines keep (`contracts`), what each process gets of the host
(`placement`), what servers are started with (`engine_specs`), and all that is read and checked
(`inputs`, `input_checks`, `stop_tokens`).

`onpolicy train`: `loop` is the algorithm, `run` its verbs, over the two engines (`engines`); `sampler`
samples and scores prompts, `train_samples` makes of them what training takes, `learning_rate` and the
governor's `ladder` say what changes on the way, `journal` writes and shows what happens, `saving` lets
a run go on later.

`verify`, `bench` and `serve` are the other commands.
"""
