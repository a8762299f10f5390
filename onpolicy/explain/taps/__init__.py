"""Recording of operators' inputs and results, row by row, on both sides; off unless asked for."""
