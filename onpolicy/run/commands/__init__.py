"""The work of `verify` and `serve`; `train` is the folder above, `bench` the one beside."""
