"""Checks of a checkpoint's safetensors files, and a reader of blocks of their tensors.

The files must be complete, undamaged and of the model's sizes. These checks read only the headers,
so they take seconds for any model. The stored numbers must be ones that both engines can compute
with: plain floating-point numbers, finite, and equal where the model ties two tensors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from onpolicy.errors import ConfigError, in_one_line
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.text_part import has_text_part, own_names, stored_name, tower_names
from onpolicy.models.vision.tower import empty_tower
from onpolicy.system.files import read_json_object
from onpolicy.weights.digest import WeightBucket, in_buckets

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"

VALUE_HEAD = "score."
"""Prefix of the names of a critic's head, as in transformers' token classifiers, which verl uses."""

AT_A_TIME = 1 << 30
"""Maximum size of a bucket, in bytes of whole weights."""

SHOWN = 5
"""Number of tensors that an error lists before it counts the others."""


def require_fit(
    path: str,
    config: PretrainedConfig,
    trust_remote_code: bool = False,
    flag: str = "--hf-checkpoint",
    *,
    of_critic: bool = False,
    sees: bool = False,
) -> None:
    """Raise ConfigError unless the weights fit a model of this configuration. sees: and its tower."""
    try:
        matched_model(path, config, trust_remote_code, flag, of_critic=of_critic)
    except (NotImplementedError, RuntimeError) as error:  # an operation without meta tensors
        logger.debug("the sizes of %s were not compared (%s)", path, error)
    if sees:
        reader, tower = CheckpointReader(path, flag), empty_tower(path)
        needed = {f"model.tower.{name}": x.shape for name, x in tower.named_parameters()}
        found = {name: reader.shape(name) for name in reader.tower}
        problem = "tensors of the vision tower are missing, or others than its config.json says"
        _require_none([n for n in needed if needed[n] != found.get(n)], problem, f"{flag}={path}")


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


class CheckpointReader:
    """A reader of the safetensors files of a directory, each opened once.

    Of a model that also sees images it reads the text part, under the names that this has alone, and by
    name also the tower's tensors. It raises ConfigError, which names `flag`, for a file that is missing
    or damaged.
    """

    def __init__(self, path: str | Path, flag: str = "--hf-checkpoint"):
        self.path, self._flag = Path(path), flag
        handles: dict[str, Any] = {}
        for file in weight_files(self.path, flag):
            handle = self._opened(file)
            handles |= dict.fromkeys(handle.keys(), handle)
        self._stored = {name: name for name in handles}
        if has_text_part(self.path):
            self._stored = own_names(handles, f"{flag}={path}")
        self._handles = {own: handles[stored] for own, stored in self._stored.items()}
        """Open file of each tensor."""

        read = {*self._stored.values()}
        self.others = {name: handle for name, handle in handles.items() if name not in read}
        """Open file of each tensor that is not of the text part, by its stored name."""

        self.tower = tower_names(self.others, f"{flag}={path}")
        """Stored name of each tensor of a vision tower, by its own name."""

    def __contains__(self, name: str) -> bool:
        return name in self._handles or name in self.tower

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, in its stored dtype."""
        for name in self._handles:
            yield name, self.read(name, ())

    def whole(self, part: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """Yield the buckets of what is trained under their stored names, then all other tensors, with
        their stored bits."""
        left = dict(self.others)
        for bucket in part:
            named = [
                (self.tower.get(own) or stored_name(own, self._stored), x) for own, x in bucket
            ]
            for name, _ in named:
                left.pop(name, None)
            yield named
        others = ((name, handle.get_tensor(name)) for name, handle in left.items())
        yield from in_buckets(others, AT_A_TIME)

    @property
    def num_others(self) -> int:
        """Return the number of elements of the tensors that are not of the text part."""
        return sum(prod(x.get_slice(name).get_shape()) for name, x in self.others.items())

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
        if name in self.tower:
            return self.others[self.tower[name]].get_slice(self.tower[name])
        return self._handles[name].get_slice(self._stored[name])

    def read(self, name: str, block: Iterable[slice | int]) -> Tensor:
        """Return a block of a tensor, in its stored dtype.

        Raise ConfigError if it holds NaN or an infinity.
        """
        index = tuple(block) or (slice(None),)
        stored = torch.as_tensor(self._slice(name)[index])
        return require_finite(stored, name, f"{self._flag}={self.path}")


FLOATING = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
"""Types of safetensors files whose values are plain floating-point numbers."""


def require_ties(
    reader: CheckpointReader, model: PreTrainedModel, config: PretrainedConfig, name: str
) -> None:
    """Raise ConfigError if two tensors that the model ties are stored with different bits.

    transformers ties such tensors only if they are equal in the model's dtype, and computes with
    both otherwise (PreTrainedModel.tie_weights), while the engines here would compute with one of
    them.
    """
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    dtype = getattr(config, "dtype", None)
    for target, source in ties.items():
        first, second = (_stored_name(reader, model, each) for each in (target, source))
        if first and second and (how := _difference(reader, first, second, dtype)):
            raise ConfigError(
                f"{name}: tie_word_embeddings={getattr(config, 'tie_word_embeddings', None)} in "
                f"config.json, and {first} is stored beside {second} with {how}. One of the two would "
                "be left out, and which one is meant is not known. Set tie_word_embeddings=false in "
                f"config.json to compute with both, as transformers does, or remove {first} from the "
                "files."
            )


def _stored_name(reader: CheckpointReader, model: PreTrainedModel, tensor: str) -> str:
    """Return the stored name of a tensor: its own, or the base model's; '' if it is not stored."""
    names = tensor, tensor.removeprefix(f"{model.base_model_prefix}.")
    return next((name for name in names if name in reader), "")


ROWS_AT_A_TIME = 4096
"""Number of rows of two tensors that are compared at a time."""


def _difference(
    reader: CheckpointReader, first: str, second: str, dtype: torch.dtype | None
) -> str:
    """Return how two stored tensors differ, read a few rows at a time; '' if their bits are equal."""
    shapes = [list(reader.shape(name)) for name in (first, second)]
    if shapes[0] != shapes[1]:
        return f"another shape, {shapes[0]} beside {shapes[1]}"
    for start in range(0, shapes[0][0], ROWS_AT_A_TIME):
        rows = [slice(start, min(start + ROWS_AT_A_TIME, shapes[0][0]))]
        one, other = reader.read(first, rows), reader.read(second, rows)
        common = dtype or torch.promote_types(one.dtype, other.dtype)
        bits = [x.to(common).contiguous().view(torch.uint8) for x in (one, other)]
        if not torch.equal(*bits):
            unequal = (bits[0] != bits[1]).reshape(len(one), -1).any(dim=1)
            return f"other numbers, the first in row {start + int(unequal.nonzero()[0])}"
    return ""


def require_numbers(reader: CheckpointReader, model: PreTrainedModel, name: str) -> None:
    """Raise ConfigError for weights stored as integers, without their scales."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    of_integers = {n for n, buffer in model.named_buffers() if not buffer.is_floating_point()}
    wrong = [
        f"{tensor} {kind}"
        for tensor, kind in reader.kinds()
        if kind not in FLOATING
        and tensor not in of_integers
        and not any(re.search(pattern, tensor) for pattern in ignored)
    ]
    if wrong:
        raise ConfigError(
            f"{name}: {', '.join(wrong[:5])}: weights must be numbers of floating point, and these "
            f"{len(wrong)} are integers. A tool that config.json says nothing of has likely quantised "
            "them; take the checkpoint that they were made from."
        )


def say_left_out(reader: CheckpointReader, model: PreTrainedModel, name: str) -> None:
    """Log which stored tensors are left out: by transformers' rule, such as draft layers, or as they
    are of other parts."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    own = model.state_dict().keys()
    left = [
        tensor
        for tensor, _ in reader.kinds()
        if tensor not in own and any(re.search(pattern, tensor) for pattern in patterns)
    ]
    if left:
        _say(
            f"{name}: {len(left)} tensors are not of the model that is trained, and are left out: "
            f"{', '.join(left[:3])}{' ...' * (len(left) > 3)}"
        )
    if reader.others:
        _say(
            f"{name}: its text part is trained, as a {type(model).__name__}; the other "
            f"{len(reader.others)} tensors are loaded and trained with --images alone, and are saved as "
            "they are without it"
        )


@cache
def _say(message: str) -> None:
    logger.info("%s", message)


def require_finite(block: Tensor, tensor: str, name: str) -> Tensor:
    """Return the block. Raise ConfigError if it holds NaN or an infinity."""
    if not block.is_floating_point() or not block.numel():
        return block
    wide = block.float() if block.element_size() == 1 else block
    total = wide.sum(dtype=torch.float64 if wide.dtype == torch.float64 else torch.float32)
    if torch.isfinite(total) or (bad := int((~torch.isfinite(wide)).sum())) == 0:
        return block
    raise ConfigError(
        f"{name}: {tensor} holds NaN or infinity ({bad} of {block.numel()} numbers that were read), and "
        "weights are finite. Its training has likely diverged; take an earlier checkpoint, or download "
        "it again."
    )
