"""The work of `verify`, `eval`, `serve` and `data`; `train` is the parent folder, `bench` its
sibling."""
