"""The typed run configuration and its validation. Imports no torch."""

from onpolicy.config.train import TrainConfig
from onpolicy.config.validate import validate

__all__ = ["TrainConfig", "validate"]
