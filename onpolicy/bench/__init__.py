"""Measurements of `onpolicy bench`: two kinds of operators, or two training engines, side by side."""
