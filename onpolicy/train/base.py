"""What a training engine offers. Nothing outside `onpolicy/train` knows which one runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from onpolicy.config.groups import FallbackConfig
from onpolicy.contract import NumericsContract
from onpolicy.types import TrainSample
from onpolicy.weights.digest import WeightBucket


class Trainer(ABC):
    """One policy, its optimizer, and the ranks that hold them. Every method is collective."""

    self_check: dict[str, str]
    """Digests of the operators' self-check at start-up; empty under a stock contract."""

    mismatched_tokens: Sequence[int | None] = ()
    """Of each sample of the last `train`: tokens that differed; None if it was not compared."""

    apart: tuple[int, Sequence[float]] | None = None
    """Of the last `train`, if its parity check failed: the first sample of which a token differed, and
    what the trainer gives its tokens."""

    @abstractmethod
    def train(
        self, samples: Sequence[TrainSample], step: int, rates: Sequence[float]
    ) -> dict[str, float]:
        """Take the optimizer steps of one rollout; return metrics, equal on all ranks.

        `rates` holds the learning rate of each; the samples, which are no fewer, are cut evenly.
        The log-probabilities of the first optimizer step are compared with the rollout's before
        its backward pass. Raises ParityError there if the run's policy is to fail.
        """

    @abstractmethod
    def adapt(self, contract: NumericsContract, fallback: FallbackConfig) -> None:
        """Go on under other operators and corrections, between rollouts."""

    @abstractmethod
    def log_probs(
        self, sequences: Sequence[list[int]], prompt_lens: Sequence[int], temperature: float
    ) -> list[Tensor]:
        """Log-probabilities of every token after a sequence's prompt: float32 [R] per sequence."""

    @abstractmethod
    def weight_buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        """All parameters, gathered `max_bytes` at a time, in a fixed order."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write model, optimizer and corrections into an existing directory."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Read back what `save` wrote, under any number of ranks."""
