"""The safetensors files of a Hugging Face checkpoint: all there, undamaged, of the model's sizes; and
what reads blocks of their tensors.

A check reads their headers alone, so it takes seconds for any model. Of weights that are stored as
numbers and scales (`compressed.py`) everyone here sees what they come to.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from onpolicy.errors import ConfigError, in_one_line
from onpolicy.models.compressed import KEY, SHAPE, Compressed, by_weight
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.weight_checks import (
    require_finite,
    require_numbers,
    require_ties,
    say_left_out,
)
from onpolicy.system.reading import read_json_object
from onpolicy.weights.digest import WeightBucket, in_buckets

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"

VALUE_HEAD = "score."
"""What the names of a critic's head begin with: that of a token classifier of transformers, which verl
makes critics of."""

AT_A_TIME = 1 << 30
"""Bytes of whole weights in a bucket."""

SHOWN = 5
"""Tensors that an error lists before it counts the others."""


def stored_shapes(directory: Path, flag: str) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, as an empty one on the meta device; whole weights, however stored.

    Raises ConfigError, which blames `flag`, for a file that is missing or damaged.
    """
    return CheckpointReader(directory, flag).shapes()


def weight_files(directory: Path, flag: str) -> list[Path]:
    """The checkpoint's files, those of its index if it has one.

    Raises ConfigError, which blames `flag`, if one is missing.
    """
    names = sorted(file.name for file in directory.glob("*.safetensors"))
    if (directory / INDEX).exists():
        names = _indexed_names(directory / INDEX, f"{flag}={directory}: {INDEX}")
    if not names:
        raise ConfigError(
            f"{flag}={directory}: no *.safetensors file there. Convert the weights with transformers' "
            "save_pretrained; pickled weights (*.bin) are not loaded."
        )
    for name in names:
        if not (directory / name).is_file():
            raise ConfigError(
                f"{flag}={directory}: {name} is missing, or is no file. Download the checkpoint again."
            )
    return [directory / name for name in names]


def _indexed_names(index: Path, name: str) -> list[str]:
    weight_map = read_json_object(index, name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{name}: holds no weight_map. Download the checkpoint again.")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(
                f"{name}: {tensor} is said to be in {file!r}, and only a file beside the index may hold "
                "it. Get the checkpoint from a source you trust."
            )
    return sorted(set(weight_map.values()))


def require_fit(
    path: str,
    config: PretrainedConfig,
    trust_remote_code: bool = False,
    flag: str = "--hf-checkpoint",
    *,
    of_critic: bool = False,
) -> None:
    """Raise ConfigError unless the weights are those of a model of this configuration."""
    if getattr(config, KEY, None):
        return  # its tensors have the shapes that another package gives them
    try:
        matched_model(path, config, trust_remote_code, flag, of_critic=of_critic)
    except (NotImplementedError, RuntimeError) as error:  # an operation without meta tensors
        logger.debug("the sizes of %s were not compared (%s)", path, error)


def matched_model(
    path: str,
    config: PretrainedConfig,
    trust_remote_code: bool = False,
    flag: str = "--hf-checkpoint",
    *,
    of_critic: bool = False,
) -> PreTrainedModel:
    """The model on the meta device, as transformers loads it from this checkpoint.

    transformers itself decides which tensors are renamed and fused, and the model remembers. Raises
    ConfigError unless the weights are those of a model of this configuration. `of_critic`: it may have a
    value head, and no output projection.
    """
    reader, name = CheckpointReader(path, flag), f"{flag}={path}"
    stored = reader.shapes()
    with _quiet():
        model = empty_causal_lm(config, trust_remote_code)
        require_numbers(reader, model, name)
        if not of_critic:
            require_ties(reader, model, config, name)
        say_left_out(reader, model, name)
        if of_critic:
            stored = _with_projection(stored, model)
        tied = getattr(model, "all_tied_weights_keys", {})
        weights = {k: v for k, v in stored.items() if tied.get(k) not in stored}
        loaded: Any = type(model).from_pretrained(
            None,
            config=config,
            state_dict=weights,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    matched: PreTrainedModel = loaded[0]
    info = loaded[1]
    _require_none(
        [f"{name} {list(has)} for {list(needs)}" for name, has, needs in info["mismatched_keys"]],
        "tensors have other shapes than config.json says",
        name,
    )
    for kind, problem in (
        ("missing_keys", "the model of its config.json needs tensors that it lacks"),
        ("unexpected_keys", "it has tensors that the model of its config.json does not know"),
    ):
        _require_none(sorted(info[kind]), problem, name)
    return matched


def _with_projection(stored: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors as if they were a causal language model's."""
    head = model.get_output_embeddings()
    prefix = next(name for name, child in model.named_children() if child is head)
    projection = {f"{prefix}.{name}": x.detach() for name, x in head.named_parameters()}
    return projection | {n: x for n, x in stored.items() if not n.startswith(VALUE_HEAD)}


def _require_none(found: list[str], problem: str, name: str) -> None:
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ConfigError(
            f"{name}: {problem}: {', '.join(sorted(found)[:SHOWN])}{more}. The weights do not belong to "
            "the config.json beside them; download the checkpoint again."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar and its report of what does not fit."""
    verbosity = transformers_logging.get_verbosity()
    had_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bar:
            transformers_logging.enable_progress_bar()


class CheckpointReader:
    """The safetensors files of a directory, each opened once.

    Raises ConfigError, which blames `flag`, for a file that is missing or damaged.
    """

    def __init__(self, path: str | Path, flag: str = "--hf-checkpoint"):
        self.path, self._flag = Path(path), flag
        self._handles: dict[str, Any] = {}
        """The open file of each tensor."""

        for file in weight_files(self.path, flag):
            handle = self._opened(file)
            self._handles |= dict.fromkeys(handle.keys(), handle)
        self._compressed = Compressed.of(self.path, flag)
        self._parts = {n: {"": n} for n in self._handles}
        if self._compressed is not None:
            self._parts = by_weight(self._handles)
        self._latest: tuple[str, Tensor] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in its turn, in the dtype in which it is stored."""
        for name in self._parts:
            yield name, self.read(name, ())

    def buckets(self) -> Iterator[WeightBucket]:
        """All of them, AT_A_TIME, for what writes each bucket as a file."""
        return in_buckets(self.tensors(), AT_A_TIME)

    def shapes(self) -> dict[str, Tensor]:
        """Every tensor as an empty one on the meta device; whole weights, however stored."""
        found: dict[str, Tensor] = {}
        for weight, names in self._parts.items():
            parts = {part: self._header(name) for part, name in names.items()}
            told = self._compressed
            shape = parts[""].shape if told is None else told.shape(parts)
            found[weight] = torch.empty(shape, device="meta")
        return found

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a whole weight, however it is stored."""
        return self.shapes()[name].shape

    def kinds(self) -> Iterator[tuple[str, str]]:
        """Yield the weights that are stored as they are, with their type in safetensors' words."""
        for name, parts in self._parts.items():
            if self._compressed is None or parts == {"": name}:
                yield name, self._slice(name).get_dtype()

    def _header(self, name: str) -> Tensor:
        """What a file's header says of a tensor; of one that holds a shape, all."""
        if name.endswith(SHAPE):
            whole: Tensor = self._handles[name].get_tensor(name)
            return whole
        return torch.empty(self._slice(name).get_shape(), device="meta")

    def _opened(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"{self._flag}={self.path}: {file.name} is no complete safetensors file "
                f"({in_one_line(error)}; {file.stat().st_size} bytes). Download it again."
            ) from error

    def require(self, shapes: dict[str, tuple[int, ...]], unread: Collection[str] = ()) -> None:
        """Raise ConfigError unless the checkpoint has exactly these tensors.

        It may have others whose names one of the regular expressions `unread` finds.
        """
        stored = self.shapes()
        found = {n for n in stored if n in shapes or not any(re.search(p, n) for p in unread)}
        name = f"{self._flag}={self.path}"
        _require_none(sorted(shapes.keys() - found), "the model needs tensors it lacks", name)
        _require_none(sorted(found - shapes.keys()), "it has tensors the model does not know", name)
        wrong = [
            f"{tensor} {list(stored[tensor].shape)} for {list(shape)}"
            for tensor, shape in shapes.items()
            if tuple(stored[tensor].shape) != shape
        ]
        _require_none(wrong, "tensors have other shapes than the model's", name)

    def _slice(self, name: str) -> Any:
        return self._handles[name].get_slice(name)

    def read(self, name: str, block: Iterable[slice | int]) -> Tensor:
        """Return the block of a tensor, in the dtype in which it is stored, or was before it was
        rounded. Raises ConfigError if it holds NaN or an infinity."""
        index = tuple(block) or (slice(None),)
        return require_finite(self._read(name, index), name, f"{self._flag}={self.path}")

    def _read(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        if self._compressed is None or self._parts[name] == {"": name}:
            return torch.as_tensor(self._slice(name)[index])
        if self._latest is None or self._latest[0] != name:  # a rank may take several blocks of it
            parts = {
                part: torch.as_tensor(self._slice(n)[:]) for part, n in self._parts[name].items()
            }
            self._latest = name, self._compressed.weight(name, parts)
        return self._latest[1][index]
