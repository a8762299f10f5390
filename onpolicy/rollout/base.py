"""What the loop asks of a rollout: start, sample, take new weights, stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

from onpolicy.rollout.client import EngineClient
from onpolicy.trajectory import Completion
from onpolicy.types import Request

Progress = Callable[[int, int], None]
"""(responses done, tokens in the latest)"""


MemoryKind = Literal["weights", "kv_cache"]
"""As SGLang names them."""


class EnginesRestartedError(Exception):
    """Engines died and run again, with the checkpoint's weights: push the current ones, then go on."""


class SamplingJob:
    """Requests, and the responses to them so far, whichever engines give them and die."""

    is_interrupted = False
    """Whether engines are to answer at once with what they have."""

    takes_parts = False
    """Whether a response that an engine gave up is an answer too."""

    def __init__(self, requests: Sequence[Request]):
        self.requests = list(requests)
        self._completions: dict[int, Completion] = {}

    def add(self, number: int, completion: Completion) -> Sequence[int]:
        """Keep the response to request `number`, counted from 0; the numbers of what it adds."""
        self._completions[number] = completion
        return ()

    @property
    def num_done(self) -> int:
        return len(self._completions)

    @property
    def missing(self) -> list[int]:
        """Numbers of the requests without a response."""
        return [i for i in range(len(self.requests)) if i not in self._completions]

    @property
    def completions(self) -> list[Completion]:
        """One response per request, in their order. Raises KeyError while one is missing."""
        return [self._completions[i] for i in range(len(self.requests))]


OnAnswer = Callable[[int, Completion], Sequence[Request]]
"""(number of the request, response) -> what is to be sampled besides, in the order of the arrivals."""


class EndlessJob(SamplingJob):
    """One that grows by what `on_answer` returns, until there is no more or it is interrupted.

    A response that an engine gave up has finish reason `abort`, and maybe no token.
    """

    takes_parts = True

    def __init__(self, requests: Sequence[Request], on_answer: OnAnswer):
        super().__init__(requests)
        self._on_answer = on_answer

    def add(self, number: int, completion: Completion) -> Sequence[int]:
        super().add(number, completion)
        first = len(self.requests)
        self.requests += self._on_answer(number, completion)
        return range(first, len(self.requests))

    def interrupt(self) -> None:
        """Have the engines answer at once, and ask them nothing more. From any thread."""
        self.is_interrupted = True

    @property
    def missing(self) -> list[int]:
        return [] if self.is_interrupted else super().missing

    @property
    def completions(self) -> list[Completion]:
        """What was answered, in the order of the requests."""
        return [self._completions[i] for i in sorted(self._completions)]


class RolloutGroup(ABC):
    """Some engines that sample from one policy."""

    clients: list[EngineClient]
    """The engines, for weight pushes."""

    on_progress: Progress
    """Called after every response."""

    @abstractmethod
    def launch(self) -> None:
        """Start the engines' processes, if they are ours to start.

        Returns at once, or, if they share GPUs with the trainer, when they have taken their part.
        """

    @abstractmethod
    def connect(self, self_check: dict[str, str]) -> None:
        """Wait until the engines answer, and check that they keep the trainer's contract.

        `self_check`: the digests of the trainer's operators. Raises ContractError or EngineError.
        """

    @abstractmethod
    def generate(self, job: SamplingJob) -> list[Completion]:
        """Sample the responses that `job` misses; all of them, in the order of its requests.

        Raises EnginesRestartedError if engines had to be started again. What was sampled is in the
        job: call again with it to have the rest.
        """

    @abstractmethod
    def revive(self) -> bool:
        """Start engines again that do not answer; whether there were any. They need weights then.

        Raises EngineError if they cannot be started again.
        """

    @abstractmethod
    def release_memory(self) -> None:
        """Give back the memory of weights and cache between rollouts, until `resume_memory`.

        Raises EngineError if an engine does not answer.
        """

    @abstractmethod
    def resume_memory(self, kind: MemoryKind) -> None:
        """Take one kind of memory back, without what stood in it; nothing if it was not given back."""

    @abstractmethod
    def stop(self) -> None:
        """End what `launch` started, and a `generate` of another thread, which raises something then.

        Safe to call at any time, and twice.
        """
