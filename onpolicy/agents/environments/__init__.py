"""Environments that people have, as functions of an episode."""
