"""Environment of a process that sees GPUs where there are none: see fake/sitecustomize.py."""

import os
from pathlib import Path

FAKE = Path(__file__).parent / "fake"


def seeing_gpus(count):
    """This process's environment, for one that sees `count` H100s, their libraries and a toolkit."""
    path = os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {
        **os.environ,
        "FAKE_GPUS": str(count),
        "PYTHONPATH": path,
        "CUDA_HOME": str(FAKE / "toolkit"),
    }
