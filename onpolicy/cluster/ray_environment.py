"""The environment variables that Ray reads, some of them on import; all its processes inherit them."""

import os
import secrets
from typing import Any

ALL_GPUS = {
    # GPUs are chosen by number, as in torch and SGLang (--base-gpu-id): processes see all of them.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""The variables of every actor (`of_actors`)."""

ALWAYS = {
    **ALL_GPUS,
    "RAY_USAGE_STATS_ENABLED": "0",
    # Without tokens, whoever can reach a cluster can run code on it.
    "RAY_AUTH_MODE": "token",
}

ONLY_THIS_HOST = {
    # Ray's switch for desktops, where it listens on loopback alone; it works on Linux, too.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

TOKEN = "RAY_AUTH_TOKEN"

_is_local = False


def of_actors() -> dict[str, Any] | None:
    """Return Ray's runtime_env for actors, since nodes of a cluster that others started may lack
    the variables. In a cluster of this process's own, return None: all nodes have inherited them,
    and there is no agent to prepare a runtime_env."""
    return None if _is_local else {"env_vars": ALL_GPUS}


def on_host(remote: Any, node: str, **options: Any) -> Any:
    """Return an actor's class or a task of Ray's that starts on that node alone, whatever runs there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return remote.options(num_cpus=0, scheduling_strategy=there, **options)


def work_in(directory: str) -> None:
    """Change an actor's process to the controller's working directory, if its host has it. Ray
    starts a worker in its node's directory, where relative paths would differ."""
    if os.path.isdir(directory):
        os.chdir(directory)


def prepare(*, local: bool) -> None:
    """Set variables that are unset, before Ray is imported. local: for a cluster of our own."""
    global _is_local
    _is_local = local
    for name, value in ALWAYS.items():
        os.environ.setdefault(name, value)
    if local:
        os.environ.update(ONLY_THIS_HOST)
        os.environ.setdefault(TOKEN, secrets.token_hex(32))
