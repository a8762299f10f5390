"""What Ray reads from the environment, some of it when it is imported; all its processes inherit it."""

from __future__ import annotations

import os
import secrets
from typing import Any

ALL_GPUS = {
    # GPUs are told apart by number, as torch and SGLang do (--base-gpu-id): all see all of a host's.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""For every actor (`of_actors`)."""

ALWAYS = {
    **ALL_GPUS,
    "RAY_USAGE_STATS_ENABLED": "0",
    # Whoever could reach a cluster without tokens could run code on it.
    "RAY_AUTH_MODE": "token",
}

ONLY_THIS_HOST = {
    # Ray's switch for clusters on a desktop, where it listens on loopback alone, does the same on Linux.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

TOKEN = "RAY_AUTH_TOKEN"

_is_local = False
"""Whether the cluster is this process's own."""


def of_actors() -> dict[str, Any] | None:
    """Ray's runtime_env of every actor: the nodes of a cluster that others started may not have the
    variables. In one of this process's own all have inherited them, and nobody could prepare it."""
    return None if _is_local else {"env_vars": ALL_GPUS}


def work_in(directory: str) -> None:
    """Let an actor's process find relative paths where the controller does, if its host has the place.

    A worker of Ray's works where its node was started.
    """
    if os.path.isdir(directory):
        os.chdir(directory)


def prepare(*, local: bool) -> None:
    """Set what the environment does not say otherwise; to be called before Ray is imported.

    local: for a cluster of this process's own, with a token of its own.
    """
    global _is_local
    _is_local = local
    for name, value in ALWAYS.items():
        os.environ.setdefault(name, value)
    if local:
        os.environ.update(ONLY_THIS_HOST)
        os.environ.setdefault(TOKEN, secrets.token_hex(32))
