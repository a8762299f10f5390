"""Names of SGLang's objects in /dev/shm, prefixed with the server's private directory, whose owner
removes them.

Diverges in stock SGLang: the names are random, so nobody can attribute them after the processes
were killed, which is how SGLang ends them. Covers its load snapshots and message queues, and all
semaphores of Python's multiprocessing. Can go when SGLang unlinks shared memory as soon as it is
open.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onpolicy.system.private_directory import name_semaphores_after
from sglang_patches import registry

DIRECTORY_VARIABLE = "ONPOLICY_ENGINE_DIRECTORY"
"""The variable that carries the directory into all processes of a server."""

PATTERNS = ("NAME*", "sem.NAME*")
"""Patterns of the names; see onpolicy/system/private_directory.py."""

TARGETS = (
    "sglang.srt.managers.load_snapshot.shm_path_for",
    "sglang.srt.utils.stale_shm_cleanup.make_shm_name",
)


def install() -> None:
    """Hook the names; do nothing in a server without a directory of its own."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None:
        return
    name = Path(directory).name
    name_semaphores_after(name)

    def prefixed(path: str, *_: Any, **__: Any) -> str:
        head, tail = os.path.split(path)
        return os.path.join(head, f"{name}_{tail}")

    for target in TARGETS:
        registry.hook(target, prefixed, "after")
