"""What a training engine (FSDP2, Megatron-core) does with one model; all else is the trainer's."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor, nn
from transformers import PretrainedConfig

from onpolicy.config.groups import TrainerConfig
from onpolicy.contract import AdapterShape
from onpolicy.models.hf_config import has_experts
from onpolicy.models.lora.adapters import FactorValues, without_adapters
from onpolicy.models.policy import PackedTokens
from onpolicy.models.trainable import frozen_digest
from onpolicy.ops import Operators
from onpolicy.ops.log_probs import Head
from onpolicy.train.batch import WeighedBatch
from onpolicy.weights.digest import WeightBucket, WeightPart

Role = str
"""What a model is there for in a run: policy, reference, critic, or teacher:NAME."""

Loss = Callable[[Any, WeighedBatch], tuple[Tensor, dict[str, Tensor]]]
"""(scores with gradient, micro-batch) -> its part of a sum over the global batch, and metrics of it."""

Check = Callable[[Tensor, WeighedBatch, Tensor, Tensor], None]
"""(log_probs float32 [R], micro-batch, entropy float32 [R], tokens drawn again float32 [R]); raises
ParityError if they must not be trained on."""


class ShardedModel(ABC):
    """A model that is sharded over the ranks, and its optimizer if it is trained.

    What a critic's forward pass gives is `Values`, where others give `Scores`, or what a micro-batch
    wants beside them (`models/scoring.py`).

    Whoever is one of several ranks calls every method together with the others. Every rank of a
    data-parallel share gets the same scores and metrics, so that what follows is the same on them.
    """

    module: nn.Module

    optimizer: Any
    """The engine's own; None if the model is not trained."""

    adapter: AdapterShape | None = None
    """The adapters that are trained in the place of all weights."""

    is_base = False
    """Whether this is what adapters are beside, without them."""

    @abstractmethod
    def use(self, operators: Operators) -> None:
        """Compute with other operators from now on."""

    @abstractmethod
    def score(self, batches: Sequence[PackedTokens]) -> list[Any]:
        """The scores of each micro-batch, without gradient."""

    @abstractmethod
    def head(self) -> Head:
        """The output projection in the compute dtype, whole or this rank's rows of the vocabulary; no
        gradient flows to it."""

    @abstractmethod
    def accumulate_gradients(
        self, batches: Sequence[WeighedBatch], loss: Loss, check: Check | None
    ) -> tuple[list[dict[str, float]], list[Tensor]]:
        """Forward, check, loss and backward of every micro-batch.

        Returns the metrics of each, and the log-probabilities, or values, that its loss was of, float32
        [R] and detached. Where `check` raises, `drop_gradients` has to follow.
        """

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget the gradients of a step that is not taken, after any number of micro-batches."""

    @abstractmethod
    def clip_gradients(self) -> float:
        """Scale the gradients to --clip-grad; returns their norm before."""

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
        """A part of the weights on some ranks, gathered `max_bytes` at a time, in a fixed order: those
        that the model computes with, or, where they are rounded, their `masters`.

        Every rank has to take all of them.
        """

    @abstractmethod
    def optimizer_tensors(self) -> list[Tensor]:
        """What the optimizer keeps from step to step; none if the model is not trained."""

    def gradient_buffers(self) -> list[Tensor]:
        """Memory of gradients that is there between steps, when nobody reads it."""
        return []

    @abstractmethod
    def write_tensors(self, directory: Path) -> None:
        """Write weights and what the optimizer keeps of them, sharded, into a new directory."""

    @abstractmethod
    def read_tensors(self, directory: Path) -> None:
        """Read back, in place, what `write_tensors` wrote, under any number of ranks."""

    @abstractmethod
    def around_operators(
        self, around: Callable[[Operators], Operators]
    ) -> AbstractContextManager[None]:
        """Meanwhile let every module compute with what `around` makes of its operators."""

    @abstractmethod
    def fill_adapters(self, values: FactorValues) -> None:
        """Give adapters numbers, before the first step or between two."""

    def without_adapters(self) -> Self | None:
        """The model that adapters are beside, of the same memory; None if it has no adapters."""
        if self.adapter is None:
            return None
        base = copy.copy(self)
        base.optimizer, base.is_base = None, True
        return base

    def as_it_is(self) -> AbstractContextManager[None]:
        """Meanwhile adapters are off in what this is the base of."""
        return without_adapters(self.module) if self.is_base else nullcontext()

    def frozen_digest(self) -> str:
        """The digest of this rank's part of what is not trained; "" if it has none."""
        return frozen_digest(self.module)


class TrainingEngine(Protocol):
    """Makes the models of a run, one for each role."""

    def __call__(
        self,
        path: str,
        operators: Operators,
        *,
        trained: bool,
        has_values: bool = False,
        rounds: bool = False,
    ) -> ShardedModel:
        """Load a Hugging Face checkpoint; with an optimizer if the model is `trained`, with a value
        head in the place of its output projection if it `has_values`; it rounds what the contract
        says that the rollout rounds if it `rounds`."""


def recomputes_activations(config: TrainerConfig, hf_config: PretrainedConfig) -> bool:
    """As the flags say, by default for mixtures of experts alone. It changes no bit of a gradient."""
    of_experts = config.moe_activation_checkpointing and has_experts(hf_config)
    return config.activation_checkpointing or of_experts
