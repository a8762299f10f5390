"""What `onpolicy bench` measures: two kinds of operators, or two training engines, side by side."""
