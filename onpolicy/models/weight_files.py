"""Checks of a checkpoint's safetensors files, and a reader of blocks of their tensors.

The files must be complete, undamaged and of the model's sizes.

The checks read only the headers, so they take seconds for any model.
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
"""Prefix of the names of a critic's head, as in transformers' token classifiers, which verl uses."""

AT_A_TIME = 1 << 30
"""Maximum size of a bucket, in bytes of whole weights."""

SHOWN = 5
"""Number of tensors that an error lists before it counts the others."""


def stored_shapes(directory: Path, flag: str) -> dict[str, Tensor]:
    """Return every tensor of the checkpoint as an empty one on the meta device.

    Raise ConfigError, which names `flag`, for a file that is missing or damaged.
    """
    return CheckpointReader(directory, flag).shapes()


def weight_files(directory: Path, flag: str) -> list[Path]:
    """Return the checkpoint's files, from its index if it has one.

    Raise ConfigError, which names `flag`, if one is missing.
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
    """Raise ConfigError unless the weights fit a model of this configuration."""
    try:
        matched_model(path, config, trust_remote_code, flag, of_critic=of_critic)
    except (NotImplementedError, RuntimeError) as error:  # an operation without meta tensors
        logger.debug("the sizes of %s were not compared (%s)", path, error)


def quantised_by(config: PretrainedConfig) -> str:
    """Return the quantisation method that a configuration names, or ''."""
    told = getattr(config, "quantization_config", None)
    return str(getattr(told, "get", lambda _: None)("quant_method") or told) if told else ""


def require_plain(config: PretrainedConfig, name: str) -> None:
    """Raise ConfigError if the checkpoint's weights are quantised."""
    if method := quantised_by(config):
        raise ConfigError(
            f"{name}: quantization_config={method} in config.json: its weights are numbers and scales, "
            "and only plain weights are read. Take the checkpoint that they were made from, or write "
            "plain weights by the lines of docs/published.md (FP8, MXFP4, compressed-tensors)."
        )


def matched_model(
    path: str,
    config: PretrainedConfig,
    trust_remote_code: bool = False,
    flag: str = "--hf-checkpoint",
    *,
    of_critic: bool = False,
) -> PreTrainedModel:
    """Return the model on the meta device, as transformers loads it from this checkpoint.

    transformers itself decides which tensors are renamed and fused, and the model remembers.
    Raise ConfigError unless the weights fit a model of this configuration. With `of_critic` there
    may be a value head, and no output projection.
    """
    name = f"{flag}={path}"
    require_plain(config, name)
    reader = CheckpointReader(path, flag)
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
    """Replace a critic's head by an output projection, so that the tensors fit a causal LM."""
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
    """Silence transformers' progress bar and its report of mismatches inside the context."""
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
    """A reader of the safetensors files of a directory, each opened once.

    It raises ConfigError, which names `flag`, for a file that is missing or damaged.
    """

    def __init__(self, path: str | Path, flag: str = "--hf-checkpoint"):
        self.path, self._flag = Path(path), flag
        self._handles: dict[str, Any] = {}
        """Open file of each tensor."""

        for file in weight_files(self.path, flag):
            handle = self._opened(file)
            self._handles |= dict.fromkeys(handle.keys(), handle)

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, in its stored dtype."""
        for name in self._handles:
            yield name, self.read(name, ())

    def buckets(self) -> Iterator[WeightBucket]:
        """Yield all tensors in buckets of AT_A_TIME bytes, for writers of one file per bucket."""
        return in_buckets(self.tensors(), AT_A_TIME)

    def shapes(self) -> dict[str, Tensor]:
        """Return every tensor as an empty one on the meta device."""
        return {name: torch.empty(self.shape(name), device="meta") for name in self._handles}

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor."""
        return torch.Size(self._slice(name).get_shape())

    def kinds(self) -> Iterator[tuple[str, str]]:
        """Yield the tensors' names with their types in safetensors' notation."""
        for name in self._handles:
            yield name, self._slice(name).get_dtype()

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

        Tensors whose names match one of the regular expressions `unread` are ignored.
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
        """Return a block of a tensor, in its stored dtype.

        Raise ConfigError if it holds NaN or an infinity.
        """
        index = tuple(block) or (slice(None),)
        stored = torch.as_tensor(self._slice(name)[index])
        return require_finite(stored, name, f"{self._flag}={self.path}")
