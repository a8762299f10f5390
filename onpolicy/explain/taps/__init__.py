"""What an operator was given and what it made of it, row by row, on both sides; off unless asked for."""
