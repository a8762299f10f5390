"""The work of every command that starts engines.

`onpolicy train`: `loop` is the algorithm and `run` its steps, on the two engines (`engines`).
`sampler` samples and scores prompts and makes training batches of them; `learning_rate` and the
governor's `ladder` hold what changes during a run; `journal` writes and shows what happens; `saving`
writes checkpoints and resumes from them. `launch` prepares a run. Other commands are in `commands`.
"""
