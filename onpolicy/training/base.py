"""The trainer's interface. Code outside `onpolicy/training` does not know which training engine runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor

from onpolicy.config.groups import FallbackConfig
from onpolicy.contract import NumericsContract
from onpolicy.images.placed import PlacedImage
from onpolicy.types import Sample, TrainOutcome
from onpolicy.weights.push import Engine

T = TypeVar("T")

TrainerMemory = Literal["state", "weights"]
"""Kind of GPU memory: optimizer state, gradient buffers and other models ("state"), or the policy's
weights ("weights")."""


class Rescored(NamedTuple):
    """A trainer's scores of the R tokens after a sequence's prompt, which an engine sampled."""

    log_probs: Tensor
    """Log-probabilities, float32 [R]."""

    drawn: Tensor
    """Token that the request's seed draws at each place, float32 [R]; NaN without a seed."""

    row_digests: Tensor
    """Digest of each token's row, int64 [R]; 0 without --parity-check full and without a seed."""


class Trainer(ABC):
    """One policy, its optimizer, and the ranks that hold them.

    With several ranks, all of them must call every method together.
    """

    self_check: dict[str, str]
    """Digests of the operators' self-check at start-up; empty under a stock contract."""

    @abstractmethod
    def train(self, samples: Sequence[Sample], step: int, rates: Sequence[float]) -> TrainOutcome:
        """Take the optimizer steps of one rollout.

        `rates` holds the learning rate of each step; the samples, at least as many, are split evenly.
        The log-probabilities of the first optimizer step are compared with the rollout's before its
        backward pass. Raises ParityError there, with its findings, if the run is set to fail on a
        mismatch.
        """

    @abstractmethod
    def adapt(self, contract: NumericsContract, fallback: FallbackConfig, centers: bool) -> None:
        """Switch to other operators and corrections, between rollouts. centers: whether scores are
        centered, in a run with --policy-loss centered."""

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
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> list[Rescored]:
        """Score every token after a sequence's prompt, sequence by sequence.

        kept_tokens: of each sequence, as in `Completion`. A token that the run's sampling filters
        exclude under the trainer's own logits has NaN for a log-probability. seeds: the seed of each
        sequence's request, with which every token is drawn again; without seeds none is. images: those
        of each sequence, if any has some.
        """

    @abstractmethod
    def on_each_rank(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Run `function(trainer, *args)` on each rank and return the results in the order of the ranks.

        `trainer` is the rank's own `PolicyTrainer`, which has the models of all roles. The function and
        its arguments are pickled, so a module of the project or the user's must define it.
        """

    @abstractmethod
    def push(self, engines: Sequence[Engine], version: int) -> str:
        """Push all weights to the engines as `version`, by --weight-sync, and return the digest of
        their bits.

        Raises the errors of `weights.push.push_weights`; the engines may hold a part of the weights
        then.
        """

    @abstractmethod
    def push_again(self, engines: Sequence[Engine], version: int) -> str:
        """Push the weights of the last push again. Where samples may lag behind the policy, these were
        kept, and training since then does not matter."""

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face checkpoint into a new directory."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write model, optimizer and corrections into an existing directory."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Read back what `save` wrote, under any number of ranks."""

    def release_memory(self, kind: TrainerMemory) -> None:
        """Free GPU memory for servers that share it: all but the policy's weights ("state"), or these
        too ("weights"). A method that needs the memory brings it back."""

    def close(self) -> None:
        """End its processes, if any were started, and its connections to engines."""
