"""The work of `verify`, `eval`, `serve` and `data`; `train` is in the parent folder."""
