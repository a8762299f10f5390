"""One optimizer step on a model of any role, with any loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from onpolicy.errors import ParityError, TrainingError
from onpolicy.train import distributed
from onpolicy.train.batch import WeighedBatch
from onpolicy.train.engine import Loss, ShardedModel
from onpolicy.train.parity_gate import ParityGate


def optimizer_step(
    model: ShardedModel,
    micro_batches: Sequence[WeighedBatch],
    loss: Loss,
    gate: ParityGate | None,
    rate: float,
) -> tuple[dict[str, float], list[Tensor]]:
    """Take an optimizer step; return its metrics, and the log-probabilities of each micro-batch in its
    loss; collective.

    Raises ParityError as the gate does, and TrainingError for a gradient that is not finite; no step is
    taken then.
    """
    check = None if gate is None else gate.check
    try:
        found, log_probs = model.accumulate_gradients(micro_batches, loss, check)
        if gate is not None:
            gate.require_all()
    except ParityError:
        model.drop_gradients()
        raise
    sums = distributed.sum_micro_batches(found)
    grad_norm = model.clip_gradients()
    if not math.isfinite(grad_norm):
        raise TrainingError(
            f"grad_norm={grad_norm}: a gradient is not finite, so no optimizer step was taken. "
            "Lower --lr, or resume from the last checkpoint with --load."
        )
    model.take_step(rate)
    return {**sums, "train/grad_norm": grad_norm, "train/lr": rate}, log_probs
