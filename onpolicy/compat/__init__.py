"""Adaptations of other libraries to this project; each process activates the ones it needs."""
