"""Tools that a policy's own text cannot hurt anything with."""
