"""What the loop asks of a rollout: start, sample, take new weights, stop."""

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
"""As SGLang names them."""


class EnginesRestartedError(Exception):
    """Engines died and run again, with the checkpoint's weights: push the current ones, then go on."""


class SamplingJob:
    """Requests, and the responses to them so far, whichever engines give them and die.

    It may grow while engines work: whoever adds requests calls `on_news` then, from any thread.
    `takes_parts`: a response that an engine gave up is an answer too, with finish reason `abort` and
    maybe no token.
    """

    def __init__(self, requests: Sequence[Request] = (), *, takes_parts: bool = False):
        self.requests = list(requests)
        self.takes_parts = takes_parts
        self.is_interrupted = False
        """Whether engines are to answer at once with what they have, and to be asked nothing more."""

        self.error: BaseException | None = None
        """What ends it before it is done."""

        self.on_news: Callable[[], object] = lambda: None
        """What engines that work on it want to have called when any of this changes."""

        self._completions: dict[int, Completion] = {}

    def add(self, number: int, completion: Completion) -> None:
        """Keep the response to request `number`, counted from 0."""
        self._completions[number] = completion

    def interrupt(self) -> None:
        """Have the engines answer at once, and ask them nothing more. From any thread."""
        self.is_interrupted = True
        self.on_news()

    def stays_with(self, number: int) -> Hashable | None:
        """What is best answered by the engine that answered it last; None: any."""
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
        """Numbers of the requests without a response."""
        return [i for i in range(len(self.requests)) if i not in self._completions]

    @property
    def completions(self) -> list[Completion]:
        """One response per request, in their order; of an interrupted job, those that there are.

        Raises KeyError while one is missing.
        """
        numbers = sorted(self._completions) if self.is_interrupted else range(len(self.requests))
        return [self._completions[i] for i in numbers]


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
        """Sample until `job` is done or interrupted: its responses, in the order of its requests.

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
