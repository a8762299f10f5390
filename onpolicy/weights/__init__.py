"""Weights on their way to the engines: digests, verified pushes, transports, rounding."""
