"""The machine and its software, and the models of which nothing but their sizes is needed.

    python -m benchmarks.gpu_quarter.machine_lines GEOMETRY DIRECTORY ...

DIRECTORY ends in `-N-layers`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from transformers import Qwen3Config

from benchmarks.gpu_quarter.result_lines import claim_output, write_line
from benchmarks.random_checkpoint import COMMON, GEOMETRIES
from tests.support.gpu.machine import describe_machine

LEAST_VOCABULARY = 10_000
"""one_batch draws tokens below this."""


def make_shell(geometry: str, directory: Path) -> None:
    """Write a config.json without weights."""
    sizes = {**COMMON, **GEOMETRIES[geometry]}
    sizes["num_hidden_layers"] = int(re.findall(r"(\d+)-layers$", directory.name)[0])
    sizes["vocab_size"] = max(sizes["vocab_size"], LEAST_VOCABULARY)
    config = Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"], dtype="bfloat16")
    config.save_pretrained(directory)


def main(geometry: str, *directories: str) -> None:
    output = claim_output()
    write_line(output, {"machine": describe_machine()})
    packages = {each.metadata["Name"]: each.version for each in distributions()}
    write_line(output, {"packages": dict(sorted(packages.items(), key=str))})
    if shutil.which("nvidia-smi"):
        shown = subprocess.run(["nvidia-smi"], capture_output=True, text=True)
        write_line(output, {"nvidia-smi": shown.stdout})
    for directory in directories:
        make_shell(geometry, Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:])
