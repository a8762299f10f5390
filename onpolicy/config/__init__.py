"""The typed run configuration and its validation. Imports no torch."""

from onpolicy.config.rules import validate
from onpolicy.config.train import TrainConfig

__all__ = ["TrainConfig", "validate"]
