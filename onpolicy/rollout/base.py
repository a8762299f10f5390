"""Interface of a rollout for the training loop: start, sample, take new weights, stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

from onpolicy.rollout.client import EngineClient
from onpolicy.trajectory import Completion
from onpolicy.types import Request

Progress = Callable[[int, int], None]
"""(responses done, tokens in the latest)"""


MemoryKind = Literal["weights", "kv_cache"]
"""The kinds of memory, named as SGLang does."""


class EnginesRestartedError(Exception):
    """Engines died and restarted with the checkpoint's weights: push the current ones and retry."""


class SamplingJob:
    """Requests and their responses so far, independent of the engines that answer or die.

    Requests may be added while engines work: call `on_news` afterwards, from any thread.
    `takes_parts`: a response that an engine gave up (`abort`), maybe without a token, is an answer.
    """

    def __init__(self, requests: Sequence[Request] = (), *, takes_parts: bool = False):
        self.requests = list(requests)
        self.takes_parts = takes_parts
        self.is_interrupted = False
        """Whether engines must answer at once with what they have, and get no further requests."""

        self.error: BaseException | None = None
        """The error that ends the job before it is done."""

        self.on_news: Callable[[], object] = lambda: None
        """A callback of the engines at work, called when any of these attributes changes."""

        self._completions: dict[int, Completion] = {}

    def add(self, number: int, completion: Completion) -> None:
        """Keep the response to request `number`, counted from 0."""
        self._completions[number] = completion

    def interrupt(self) -> None:
        """Have the engines answer at once, and send nothing more. Callable from any thread."""
        self.is_interrupted = True
        self.on_news()

    def stays_with(self, number: int) -> Hashable | None:
        """Return a key whose requests should go to one engine; None: any engine."""
        return None

    @property
    def is_done(self) -> bool:
        """Whether engines have nothing more to do, now and later."""
        return self.num_done == len(self.requests)

    @property
    def num_done(self) -> int:
        return len(self._completions)

    @property
    def missing(self) -> list[int]:
        """The numbers of the requests without a response."""
        return [i for i in range(len(self.requests)) if i not in self._completions]

    @property
    def completions(self) -> list[Completion]:
        """The responses in the order of their requests; of an interrupted job, those that exist."""
        numbers = sorted(self._completions) if self.is_interrupted else range(len(self.requests))
        return [self._completions[i] for i in numbers]


class RolloutGroup(ABC):
    """A group of engines that sample from one policy."""

    clients: list[EngineClient]
    """The engines, for weight pushes."""

    on_progress: Progress
    """A callback after every response."""

    @abstractmethod
    def launch(self) -> None:
        """Start the engines that are ours; wait for those that share the trainer's GPUs."""

    @abstractmethod
    def connect(self, self_check: dict[str, str]) -> None:
        """Wait for the engines, and check their contract and `self_check`, the operators' digests.

        Raises ContractError or EngineError.
        """

    @abstractmethod
    def generate(self, job: SamplingJob) -> list[Completion]:
        """Sample until `job` is over; return its responses in the order of its requests.

        Raises EnginesRestartedError if engines had to be restarted: call again for the rest.
        """

    @abstractmethod
    def revive(self) -> bool:
        """Restart engines that do not answer; return whether there were any, which need weights."""

    @abstractmethod
    def release_memory(self) -> None:
        """Release the memory of weights and KV cache between rollouts. Raises EngineError."""

    @abstractmethod
    def resume_memory(self, kind: MemoryKind) -> None:
        """Take one kind of memory back, without its content; do nothing if it was not released."""

    @abstractmethod
    def stop(self) -> None:
        """End what `launch` started; a `generate` in another thread raises an error then."""
