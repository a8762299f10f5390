"""Checks that a checkpoint's stored numbers are ones that both engines can compute with."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from onpolicy.errors import ConfigError

logger = logging.getLogger(__name__)

ROWS_AT_A_TIME = 4096
"""Number of rows of two tensors that are compared at a time."""


class Reader(Protocol):
    """A reader of a checkpoint's tensors, such as `CheckpointReader`."""

    def __contains__(self, name: str) -> bool: ...
    def shape(self, name: str) -> torch.Size: ...
    def kinds(self) -> Iterator[tuple[str, str]]: ...
    def read(self, name: str, block: Iterable[slice | int]) -> Tensor: ...


FLOATING = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
"""Types of safetensors files whose values are plain floating-point numbers."""


def require_ties(
    reader: Reader, model: PreTrainedModel, config: PretrainedConfig, name: str
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


def require_numbers(reader: Reader, model: PreTrainedModel, name: str) -> None:
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


def say_left_out(reader: Reader, model: PreTrainedModel, name: str) -> None:
    """Log which stored tensors transformers leaves out by rule, such as draft layers."""
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


def _stored_name(reader: Reader, model: PreTrainedModel, tensor: str) -> str:
    """Return the stored name of a tensor: its own, or the base model's; '' if it is not stored."""
    names = tensor, tensor.removeprefix(f"{model.base_model_prefix}.")
    return next((name for name in names if name in reader), "")


def _difference(reader: Reader, first: str, second: str, dtype: torch.dtype | None) -> str:
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
