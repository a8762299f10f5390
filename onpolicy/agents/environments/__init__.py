"""Adapters for existing environments, as functions of an episode."""
