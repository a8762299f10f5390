"""torchrun's ranks, before they know each other."""

from __future__ import annotations

import os


def is_first_rank() -> bool:
    """Whether this process, started by torchrun or alone, is the one that checks the inputs."""
    return os.environ.get("RANK", "0") == "0"


def is_first_on_host() -> bool:
    """Whether this process is the one whose mistakes in the inputs are shown: all have the same."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def num_ranks() -> int:
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))
