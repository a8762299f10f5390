"""The work of every command that starts engines.

`onpolicy train`: `loop` is the algorithm, `run` its verbs, over the two engines (`engines`); `sampler`
samples and scores prompts and makes of them what training takes, `learning_rate` and the
governor's `ladder` say what changes on the way, `journal` writes and shows what happens, `saving` lets
a run go on later. What comes before is in `launch`; the other commands are in `commands` and `bench`.
"""
