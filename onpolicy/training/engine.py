"""A training engine's interface (FSDP2, Megatron-core) to one model, and an optimizer step on the
model.

The step, or its forward pass alone, is the same for a model of any role and with any loss. The trainer
does the rest.
"""

from __future__ import annotations

import copy
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from fallback_correction.effective_rate import WEIGHT_SUMS, rate_factor
from onpolicy.config.groups import TrainerConfig
from onpolicy.contract import AdapterShape
from onpolicy.errors import ParityError, TrainingError
from onpolicy.models.hf_config import has_experts
from onpolicy.models.lora.adapters import FactorValues, without_adapters
from onpolicy.models.policy import PackedTokens
from onpolicy.ops import Operators
from onpolicy.ops.log_probs import Head
from onpolicy.training import distributed
from onpolicy.training.batch import MicroBatch
from onpolicy.training.loss_scale import POWERS, LossScale
from onpolicy.training.parity_gate import ParityGate
from onpolicy.weights.digest import WeightBucket, WeightDigest, WeightPart

logger = logging.getLogger(__name__)

Role = str
"""Role of a model in a run: policy, reference, critic, or teacher:NAME."""

Loss = Callable[[Any, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""(scores with gradient, micro-batch) -> part of a sum over the global batch, and its metrics."""

Check = Callable[[Tensor, MicroBatch, Tensor, Tensor], None]
"""(log_probs float32 [R], micro-batch, redrawn tokens float32 [R], digests of rows int64 [R]); raises
ParityError if they must not be trained on."""


class ShardedModel(ABC):
    """A model that is sharded over the ranks, with its optimizer if it is trained.

    A critic's forward pass returns `Values`, other models' `Scores` or the variant that a micro-batch
    asks for (`models/policy.py`).

    With several ranks, all of them must call every method together. Every rank of a data-parallel share
    gets the same scores and metrics, so that the following computations are the same on them.
    """

    module: nn.Module

    optimizer: Any
    """Optimizer of the engine; None if the model is not trained."""

    loss_scale: LossScale | None = None
    """Scale of the loss of a trained model in float16."""

    adapter: AdapterShape | None = None
    """Adapters that are trained instead of all weights."""

    is_base = False
    """Whether this is the base model of adapters, without them."""

    @property
    def scale(self) -> float:
        """Return the factor of the loss in `accumulate_gradients`, of which `clip_gradients` frees the
        gradients."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    @abstractmethod
    def use(self, operators: Operators) -> None:
        """Compute with these operators from now on."""

    @abstractmethod
    def score(self, batches: Sequence[PackedTokens]) -> list[Any]:
        """Return the scores of each micro-batch, without gradient."""

    @abstractmethod
    def head(self) -> Head:
        """Return the output projection in the compute dtype, whole or this rank's rows of the
        vocabulary; no gradient flows to it."""

    @abstractmethod
    def accumulate_gradients(
        self, batches: Sequence[MicroBatch], loss: Loss, check: Check | None
    ) -> tuple[list[dict[str, float]], list[Tensor]]:
        """Run forward, check, loss and backward of every micro-batch.

        Returns the metrics of each micro-batch, and the log-probabilities (or values) that its loss
        used, float32 [R] and detached. If `check` raises, the caller must call `drop_gradients`.
        """

    @abstractmethod
    def drop_gradients(self) -> None:
        """Discard the gradients of a step that is not taken, after any number of micro-batches."""

    @abstractmethod
    def clip_gradients(self) -> float:
        """Clip the gradients to --clip-grad and return their norm before clipping."""

    @abstractmethod
    def take_step(self, rate: float) -> None:
        """Take the optimizer step at this learning rate, and clear the gradients."""

    @abstractmethod
    def weight_buckets(
        self,
        max_bytes: int,
        part: WeightPart = "all",
        ranks: Collection[int] = (0,),
        masters: bool = False,
    ) -> Iterator[WeightBucket]:
        """Yield a part of the weights on some ranks, gathered `max_bytes` at a time, in a fixed order:
        the weights that the model computes with, or, where these are rounded, their `masters`.

        Every rank has to iterate over all buckets.
        """

    @abstractmethod
    def optimizer_tensors(self) -> list[Tensor]:
        """Return the optimizer's state tensors; empty if the model is not trained."""

    def gradient_buffers(self) -> list[Tensor]:
        """Return gradient buffers that stay allocated between steps, when nothing reads them."""
        return []

    @abstractmethod
    def write_tensors(self, directory: Path) -> None:
        """Write weights and optimizer state, sharded, into a new directory."""

    @abstractmethod
    def read_tensors(self, directory: Path) -> None:
        """Read back, in place, what `write_tensors` wrote, under any number of ranks."""

    @abstractmethod
    def around_operators(
        self, around: Callable[[Operators], Operators]
    ) -> AbstractContextManager[None]:
        """Wrap the operators of every module by `around` within this context."""

    @abstractmethod
    def fill_adapters(self, values: FactorValues) -> None:
        """Set the adapters' weights, before the first step or between two steps."""

    def without_adapters(self) -> Self | None:
        """Return the base model of the adapters, which shares their memory; None if there are no
        adapters."""
        if self.adapter is None:
            return None
        base = copy.copy(self)
        base.optimizer, base.is_base = None, True
        return base

    def as_it_is(self) -> AbstractContextManager[None]:
        """Switch adapters off within this context, if this is a base model."""
        return without_adapters(self.module) if self.is_base else nullcontext()

    def frozen_digest(self) -> str:
        """Return the digest of this rank's part of the frozen weights; "" if it has none."""
        digest, frozen = WeightDigest(), False
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                frozen, part = True, parameter.detach()
                digest.add(name, part.to_local() if isinstance(part, DTensor) else part)
        return digest.hexdigest() if frozen else ""


class TrainingEngine(Protocol):
    """A loader of the models of a run, one for each role."""

    def __call__(
        self,
        path: str,
        operators: Operators,
        *,
        trained: bool,
        has_values: bool = False,
        rounds: bool = False,
    ) -> ShardedModel:
        """Load a Hugging Face checkpoint: `trained` adds an optimizer, `has_values` replaces the output
        projection by a value head, and `rounds` applies the contract's rounding of the rollout."""


def recomputes_activations(config: TrainerConfig, hf_config: PretrainedConfig) -> bool:
    """Return whether activations are recomputed: if asked, and for mixtures of experts. No bit of a
    gradient changes."""
    return config.activation_checkpointing or has_experts(hf_config)


def optimizer_step(
    model: ShardedModel,
    micro_batches: Sequence[MicroBatch],
    loss: Loss,
    gate: ParityGate | None,
    rate: float,
) -> tuple[dict[str, float], list[Tensor]]:
    """Take an optimizer step; return its metrics, and the log-probabilities of each micro-batch in its
    loss; collective.

    Raises ParityError as the gate does, and TrainingError for a gradient that is not finite; no step is
    taken then. In float16 such a step is skipped and the loss's scale halved, unless the loss is not
    finite either or the scale is at its least.
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
    is_finite, scaled = math.isfinite(grad_norm), _scale_metrics(model, grad_norm)
    if not is_finite and not _may_skip(model, sums):
        other = "" if model.loss_scale is None else ", or choose --dtype bfloat16"
        raise TrainingError(
            f"grad_norm={grad_norm}: a gradient is not finite, so no optimizer step was taken. "
            f"Lower --lr, or resume from the last checkpoint with --load{other}."
        )
    rate = _scaled(rate if is_finite else 0.0, sums)
    if is_finite:
        model.take_step(rate)
    else:
        model.drop_gradients()
    if model.loss_scale is not None:
        model.loss_scale.take(is_finite)
    return {**sums, **scaled, "train/grad_norm": grad_norm, "train/lr": rate}, log_probs


def _scale_metrics(model: ShardedModel, grad_norm: float) -> dict[str, float]:
    if model.loss_scale is None:
        return {}
    skipped = float(not math.isfinite(grad_norm))
    return {"train/loss_scale": model.scale, "train/skipped_share": skipped}


def _may_skip(model: ShardedModel, sums: Mapping[str, float]) -> bool:
    """Return whether a smaller scale may cure gradients that are not finite, and say so."""
    losses = [sums[name] for name in ("train/loss", "critic/vf_loss") if name in sums]
    if model.loss_scale is None or model.scale == POWERS[0] or not all(map(math.isfinite, losses)):
        return False
    logger.warning(
        "a gradient overflowed float16 at loss scale %g: this optimizer step is skipped, and the next "
        "one has half the scale",
        model.scale,
    )
    return True


def no_step(
    model: ShardedModel,
    micro_batches: Sequence[MicroBatch],
    loss: Loss,
    gate: ParityGate | None,
) -> tuple[dict[str, float], list[Tensor]]:
    """Compare and measure as `optimizer_step` does, without training the model; collective."""
    found, log_probs = [], []
    scored = model.score([batch.packed for batch in micro_batches])
    for scores, batch in zip(scored, micro_batches, strict=True):
        if gate is not None:
            gate.check(scores.log_probs, batch, scores.drawn, scores.row_digests)
        _, metrics = loss(scores, batch)
        found.append({name: float(value) for name, value in metrics.items()})
        log_probs.append(scores.log_probs)
    if gate is not None:
        gate.require_all()
    sums = distributed.sum_micro_batches(found)
    return {**sums, "train/lr": _scaled(0.0, sums)}, log_probs


def _scaled(rate: float, sums: dict[str, float]) -> float:
    """Return a step's learning rate, where its weights decide; their sums become its factor."""
    weights = [sums.pop(name) for name in WEIGHT_SUMS if name in sums]
    if not weights:
        return rate
    sums["train/lr_ess_factor"] = factor = rate_factor(*weights)
    return rate * factor
