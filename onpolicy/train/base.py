"""What a training engine offers. Nothing outside `onpolicy/train` knows which one runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor

from onpolicy.config.groups import FallbackConfig
from onpolicy.contract import NumericsContract
from onpolicy.types import TrainOutcome, TrainSample
from onpolicy.weights.push import Engine

T = TypeVar("T")

TrainerMemory = Literal["state", "weights"]
"""Optimizer state, gradients' memory and other models; and the policy's weights."""


class Rescored(NamedTuple):
    """What a trainer says of the R tokens after the prompt of a sequence, which an engine sampled."""

    log_probs: Tensor
    """float32 [R]"""

    drawn: Tensor
    """float32 [R]: the token that the request's seed draws in the place of each; NaN without a seed"""


class Trainer(ABC):
    """One policy, its optimizer, and the ranks that hold them.

    Whoever is one of several ranks calls every method together with the others.
    """

    self_check: dict[str, str]
    """Digests of the operators' self-check at start-up; empty under a stock contract."""

    @abstractmethod
    def train(
        self, samples: Sequence[TrainSample], step: int, rates: Sequence[float]
    ) -> TrainOutcome:
        """Take the optimizer steps of one rollout.

        `rates` holds the learning rate of each; the samples, which are no fewer, are cut evenly.
        The log-probabilities of the first optimizer step are compared with the rollout's before
        its backward pass. Raises ParityError there, with its findings, if the run's policy is to
        fail.
        """

    @abstractmethod
    def adapt(self, contract: NumericsContract, fallback: FallbackConfig) -> None:
        """Go on under other operators and corrections, between rollouts."""

    def log_probs(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        temperature: float,
        kept_tokens: Sequence[list[bytes]] = (),
    ) -> list[Tensor]:
        """Return the log-probabilities of `rescore`."""
        found = self.rescore(sequences, prompt_lens, temperature, kept_tokens)
        return [each.log_probs for each in found]

    @abstractmethod
    def rescore(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        temperature: float,
        kept_tokens: Sequence[list[bytes]] = (),
        seeds: Sequence[int] = (),
    ) -> list[Rescored]:
        """Return what every token after a sequence's prompt has, sequence by sequence.

        kept_tokens: of each sequence, as in `Completion`. A token that was not drawn from what the run's
        cut leaves of the trainer's own logits has NaN for a log-probability. seeds: those of the
        requests that the sequences answer, by which every token is drawn again; without them none is.
        """

    @abstractmethod
    def on_each_rank(self, function: Callable[..., T], *args: Any) -> list[T]:
        """What `function(trainer, *args)` returns on each rank, in their order.

        `trainer` is the rank's own `PolicyTrainer`, which has the models of all roles. The function and
        its arguments are pickled: a module of the project or of the user's has it by name.
        """

    @abstractmethod
    def push(self, engines: Sequence[Engine], version: int) -> str:
        """Give the engines all weights as `version`, by --weight-sync; the digest of these bits.

        Raises what `weights.push.push_weights` raises; then the engines may hold a part of them.
        """

    @abstractmethod
    def push_again(self, engines: Sequence[Engine], version: int) -> str:
        """Give them what the last push gave them. Where samples may lag behind the policy, that was
        kept, and what was trained since does not matter."""

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face checkpoint into a directory that is made for it."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write model, optimizer and corrections into an existing directory."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Read back what `save` wrote, under any number of ranks."""

    def release_memory(self, kind: TrainerMemory) -> None:
        """Leave memory of the GPUs to servers that share them: all but the policy's weights ("state"),
        or these too ("weights"). Whatever needs it brings it back."""

    def close(self) -> None:
        """End the processes that were started for it, if any were, and what it keeps with engines."""
