"""The typed run configuration and its validation. Imports no torch."""

from onpolicy.config.train import TrainConfig, validate

__all__ = ["TrainConfig", "validate"]
