"""The typed run configuration, its validation and the YAML overlay. Imports no torch."""

from onpolicy.config.parse import parse
from onpolicy.config.train import TrainConfig, validate

__all__ = ["TrainConfig", "parse", "validate"]
