"""The GPU and the software that a record was made with, and records that are never half written."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = (
    "torch", "triton", "transformers", "sglang", "sglang-kernel", "sgl-deep-gemm",
    "apache-tvm-ffi",
)  # fmt: skip


def describe_machine():
    """The device, CUDA, Python and the packages whose kernels run, by version."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found["device"] = f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "no metadata"  # not installed, or carried as files on PYTHONPATH
    return found


def write_json(file, record):
    """Replace `file` by the record in one step, so that a killed process leaves the last one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.part")
    unfinished.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(unfinished, file)
