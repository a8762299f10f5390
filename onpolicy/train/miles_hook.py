"""A correction by the user's own function, called as Miles and slime call --custom-tis-function-path.

Miles: `policy_loss_function` in miles/backends/training_utils/loss/hub/losses.py; slime: the same in
slime/backends/megatron_utils/loss.py, without parallel_state and max_seq_lens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onpolicy.errors import ConfigError
from onpolicy.train import distributed
from onpolicy.train.batch import CustomCorrection, WeighedBatch
from onpolicy.train.loss import weighted_sum

GIVEN = (
    "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths",
    "response_lengths", "parallel_state", "max_seq_lens", "cur_log_probs",
)  # fmt: skip
"""Parameters that a function may have, besides `args`."""


@dataclass(frozen=True)
class GroupInfo:
    """A rank's place in a group, with Miles' field names."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ParallelState:
    """A function's view of the ranks, after Miles' class of this name."""

    cp: GroupInfo = field(default_factory=GroupInfo)
    """Context-parallel group: always one rank, since sequences come whole under context parallelism
    too."""

    intra_dp: GroupInfo = field(default_factory=GroupInfo)
    """Group of ranks that hold other samples."""


def miles_correction(
    function: Callable[..., Any], args: object, *, bypass: bool = False
) -> CustomCorrection:
    """Wrap the function as a correction of a micro-batch.

    It gets `args`, the per-token loss [R], lists of one tensor per sequence, and the parameters of
    `GIVEN` that its signature names; train_log_probs are the old policy's, or the loss's own where
    these were not computed before, as with `bypass`. It returns (loss [R], masks, metrics of [R]);
    metrics become `tis/<name>`, as shares of the global batch. Raises ConfigError if it has other
    required parameters.
    """
    names = _asked_for(function)

    def correction(
        loss: Tensor, log_probs: Tensor, batch: WeighedBatch
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        lens = batch.response_lens
        old = log_probs if bypass or batch.old_log_probs is None else batch.old_log_probs
        given = {
            "pg_loss": loss,
            "train_log_probs": old.split(lens),
            "rollout_log_probs": batch.rollout_log_probs.split(lens),
            "loss_masks": batch.mask.float().split(lens),
            "total_lengths": [len(s.sample.token_ids) for s in batch.samples],
            "response_lengths": lens,
            "parallel_state": _parallel_state(),
            "max_seq_lens": None,  # Miles sets it for padded sequences; these are packed
            "cur_log_probs": log_probs.split(lens),
        }
        asked = {k: list(v) if isinstance(v, tuple) else v for k, v in given.items() if k in names}
        loss, masks, found = function(args, **asked)
        metrics = {
            f"tis/{name}": weighted_sum(_flat(value), batch.shares) for name, value in found.items()
        }
        return loss, _flat(masks), metrics

    return correction


def _asked_for(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names among `GIVEN` that the function takes."""
    parameters = list(inspect.signature(function).parameters.values())[1:]  # after args
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return GIVEN
    needs = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if unknown := [name for name in needs if name not in GIVEN]:
        name = getattr(function, "__name__", function)
        raise ConfigError(
            f"--custom-tis-function-path: {name} needs {', '.join(unknown)}, which no caller gives. It "
            f"may ask for {', '.join(GIVEN)}, or take **kwargs."
        )
    return tuple(p.name for p in parameters if p.name in GIVEN)


def _parallel_state() -> ParallelState:
    if not dist.is_initialized():
        return ParallelState()
    data = GroupInfo(distributed.data_rank(), distributed.data_size(), distributed.data_group())
    return ParallelState(intra_dp=data)


def _flat(values: Any) -> Tensor:
    return torch.cat(list(values)) if isinstance(values, (list, tuple)) else values
