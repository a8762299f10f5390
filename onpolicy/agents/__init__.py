"""Agents: a user's functions that drive episodes, in worker processes, and the tools they call."""
