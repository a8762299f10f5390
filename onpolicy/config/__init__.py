"""The typed run configuration and its validation. Imports no torch."""

from onpolicy.config.rules import validate
from onpolicy.config.train_flags import TrainConfig

__all__ = ["TrainConfig", "validate"]
