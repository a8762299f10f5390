"""onpolicy: reinforcement learning in which rollout and training agree to the last bit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onpolicy.api import train
    from onpolicy.config import TrainConfig
    from onpolicy.types import Sample

__all__ = ["Sample", "TrainConfig", "train"]

_HOMES = {"Sample": "onpolicy.types", "TrainConfig": "onpolicy.config", "train": "onpolicy.api"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: most modules of the package need none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
