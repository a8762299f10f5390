"""Vision towers of published models by the aligned operators, and their rows in a decoder."""
