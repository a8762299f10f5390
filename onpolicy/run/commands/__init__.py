"""The work of `verify`, `explain` and `serve`; `train` is the folder above, `bench` the one beside."""
