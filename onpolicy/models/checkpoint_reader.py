"""Reads blocks of the tensors of a Hugging Face checkpoint, without reading the rest."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from onpolicy.errors import ConfigError
from onpolicy.models.weight_files import weight_files

SHOWN = 10
"""Names that an error lists before it counts the others."""


class CheckpointReader:
    """The safetensors files of a directory, opened when a tensor of theirs is first asked for."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._open: dict[Path, Any] = {}
        self._files: dict[str, Path] = {}
        for file in weight_files(self.path, "--hf-checkpoint"):
            self._files |= dict.fromkeys(self._handle(file).keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]

    def require(self, shapes: dict[str, tuple[int, ...]], unread: Collection[str] = ()) -> None:
        """Raise ConfigError unless the checkpoint has exactly these tensors.

        It may have others whose names one of the regular expressions `unread` finds.
        """
        found = {n for n in self._files if n in shapes or not any(re.search(p, n) for p in unread)}
        self._require_none(sorted(shapes.keys() - found), "the model needs tensors it lacks")
        self._require_none(sorted(found - shapes.keys()), "it has tensors the model does not know")
        wrong = []
        for name, shape in shapes.items():
            stored = tuple(self._slice(name).get_shape())
            if stored != shape:
                wrong.append(f"{name} {list(stored)} for {list(shape)}")
        self._require_none(wrong, "tensors have other shapes than the model's")

    def _require_none(self, names: list[str], problem: str) -> None:
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise ConfigError(
                f"--hf-checkpoint={self.path}: {problem}: {', '.join(names[:SHOWN])}{more}. The weights "
                "do not belong to the config.json beside them; download the checkpoint again."
            )

    def _slice(self, name: str) -> Any:
        return self._handle(self._files[name]).get_slice(name)

    def read(self, name: str, block: Iterable[slice | int]) -> Tensor:
        """The block of a tensor, in the dtype in which it is stored."""
        index = tuple(block) or (slice(None),)
        return torch.as_tensor(self._slice(name)[index])
