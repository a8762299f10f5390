"""Weights on their way to the engines: digest, push and its proof, transports, rounding."""
