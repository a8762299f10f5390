"""Episodes in worker processes, where a user's function blocks no other for long.

Tokens are sampled, kept and scored in the run's process. A worker gets to know them and asks for
more; it cannot make any. `WorkerLink` starts, serves, watches and ends one worker process; all of it
but `end` belongs to the event loop of the episodes. `RemoteEpisode` is an episode whose function
runs in a worker: it answers the calls of the branches, and holds the result.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from onpolicy.agents.worker_messages import ERRORS, Message, Parser, from_run
from onpolicy.config.groups.agent_flags import AgentConfig, has_programs, has_workers
from onpolicy.errors import AgentError, ConfigError, in_one_line
from onpolicy.images.placed import PlacedImage
from onpolicy.rollout.rollouter import Episode, Rollouter
from onpolicy.rollout.turns import Turns
from onpolicy.system import guard
from onpolicy.types import Prompt

logger = logging.getLogger(__name__)

FEWEST, MOST = 1, 16


class WorkerRollouter(Rollouter):
    """A rollouter that gives each episode to the worker with the fewest, and replaces lost workers.

    `hang_limit`: seconds that a function may compute without awaiting anything, or go on after it
    was cancelled. The episodes of a lost worker fail (AgentError).
    """

    def __init__(self, function: AgentFunction, num_workers: int, hang_limit: float):
        self._function, self._hang_limit = function, hang_limit
        self._links: list[WorkerLink | None] = [None] * num_workers
        self._leaving = list[WorkerLink]()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_closed = False

    async def ready(self) -> None:
        """Start the workers that are missing, and wait for them if no other can take an episode."""
        links = self._live()
        if not any(link.is_ready for link in links):
            await asyncio.gather(*(asyncio.shield(link.started) for link in links))

    async def roll_out(self, prompt: Prompt, turns: Turns) -> Episode:
        links = self._live()
        usable = [link for link in links if link.is_ready] or links
        idlest = min(usable, key=lambda link: len(link.episodes))
        return await idlest.run(RemoteEpisode(next(self._numbers), prompt, turns))

    def _live(self) -> list[WorkerLink]:
        with self._lock:
            if self._is_closed:
                raise AgentError("the run has ended", reason="died")
            for place, link in enumerate(self._links):
                if link is None or link.is_lost or link.is_leaving:
                    self._leaving += [link] if link else []
                    self._links[place] = WorkerLink(self._function, self._hang_limit)
            self._leaving = [link for link in self._leaving if not link.is_lost]
            return [link for link in self._links if link is not None]

    def close(self) -> None:
        """End all workers and their children. Callable from any thread."""
        with self._lock:
            self._is_closed = True
            links = [link for link in self._links if link is not None]
        for link in (*links, *self._leaving):
            link.end()


def num_workers(config: AgentConfig) -> int:
    """Return the number of worker processes of a run."""
    if not has_workers(config):
        return 0
    if config.agent_workers is not None:
        return config.agent_workers
    return default_workers()


def num_programs(config: AgentConfig) -> int | None:
    """Return the largest number of programs at a time, by default four a core; None without any."""
    if not has_programs(config):
        return None
    return config.agent_programs or 4 * len(os.sched_getaffinity(0))


def default_workers() -> int:
    """Return half the number of cores, within limits: engines and trainer need cores too."""
    return min(max(len(os.sched_getaffinity(0)) // 2, FEWEST), MOST)


@dataclass(frozen=True, kw_only=True)
class AgentFunction:
    """A user's function, as a worker finds it."""

    path: str
    """package.module.function or path/to/file.py:function"""

    flag: str = "--custom-generate-function-path"
    """The flag that names it, for messages."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments, besides turns and prompt."""


START_SECONDS = 120.0
"""The most seconds for a worker to import the function."""

_MISSES = 8
"""Silent intervals in a row that count as hanging; an interval is a quarter of the hang limit."""


class WorkerLink:
    """A worker process and its episodes."""

    def __init__(self, function: AgentFunction, hang_limit: float):
        self.episodes: dict[int, RemoteEpisode] = {}
        self.is_lost = self.is_leaving = False
        """Whether the process is gone, or is to end with its last episode."""

        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A future, done when the function is loaded. Its error: ConfigError or AgentError."""

        self._hang_limit, self._missed = hang_limit, 0
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._makes: dict[int, asyncio.Future[Any]] = {}
        self._parser = Parser(json.loads)
        self._lock = threading.Lock()
        ours, self._process, self._held = _start(hang_limit)
        self._writer: asyncio.StreamWriter | None = None
        self._unsent = list[bytes]()
        self._serving = asyncio.create_task(self._serve(ours))
        self._watching = asyncio.create_task(self._watch())
        names = {"path": function.path, "flag": function.flag}
        self._send({"kind": "load", "arguments": dict(function.arguments), **names})

    @property
    def is_ready(self) -> bool:
        """Whether the worker takes episodes at once."""
        return self.started.done() and not self.is_lost

    async def run(self, episode: RemoteEpisode) -> Episode:
        """Have the worker roll out the episode. Raises AgentError if that fails or the worker is
        lost, and ConfigError if the function cannot be used."""
        self.episodes[episode.number] = episode
        self._send(episode.begins())
        try:
            return await episode.outcome
        except asyncio.CancelledError:
            self._send({"kind": "cancel", "episode": episode.number, "name": episode.name})
            raise
        finally:
            del self.episodes[episode.number]
            if self.is_leaving and not self.episodes and self._writer is not None:
                self._writer.close()

    def end(self) -> int:
        """End the process and all its children; return its exit code. Callable from any thread."""
        with self._lock:
            if self._held >= 0:
                os.close(self._held)
                self._held = -1
        guard.let_end(self._process)
        return self._process.wait()

    def _send(self, message: Message) -> None:
        data = from_run(message)
        if self._writer is None:
            self._unsent.append(data)
        elif not self._writer.is_closing():
            self._writer.write(data)

    async def _serve(self, ours: socket.socket) -> None:
        """Read the worker's messages until it is gone or unusable."""
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.writelines(self._unsent)
        error: Exception = AgentError("its worker process ended", reason="died")
        try:
            while data := await reader.read(1 << 18):
                self._missed = 0
                for message in self._parser.feed(data):
                    self._take(message)
        except (AgentError, ConfigError) as lost:
            error = lost
        except (OSError, ValueError, KeyError, TypeError, IndexError) as lost:
            text = f"its worker process says what makes no sense ({in_one_line(lost)})"
            error = AgentError(text, reason="died")
        self._watching.cancel()
        await self._lose(error)

    async def _watch(self) -> None:
        """Detect a silent worker; time in which this process stood still itself does not count."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(self.started)
            while self._missed < _MISSES:
                await asyncio.sleep(self._hang_limit / 4)
                self._missed += 1
            text = (
                "its worker process stands still: it was stopped, or a function computes and lets no "
                "thread go on"
            )
        except TimeoutError:
            text = f"its function was not imported after {START_SECONDS:g} seconds"
        self._serving.cancel()
        await self._lose(AgentError(text, reason="hung"))

    async def _lose(self, error: Exception) -> None:
        """Fail the episodes of a lost worker; another worker takes its place."""
        self.is_lost = True
        if self._writer is not None:
            self._writer.close()
        code = await asyncio.to_thread(self.end)
        if isinstance(error, AgentError) and code:
            error = AgentError(f"{error} ({_how(code)})", reason=error.reason)
        if self.episodes:
            logger.error("%d episodes fail: %s", len(self.episodes), error)
        if not self.started.done():
            self.started.set_exception(error)
            self.started.exception()  # nobody may be waiting
        for call in self._calls.values():
            call.cancel()
        for episode in self.episodes.values():
            episode.fail(error)

    def _take(self, message: Message) -> None:
        """Handle a message. Raises AgentError or ConfigError if the worker is unusable."""
        episode = self.episodes.get(message.get("episode", -1))
        match message["kind"]:
            case "ready":
                self.started.set_result(None)
            case "unusable":
                raise ConfigError(message["text"])
            case "call":
                self._call(message, episode)
            case "withdraw" if call := self._calls.get(message["number"]):
                call.cancel()
            case "made" if waiting := self._makes.get(message["number"]):
                if "error" in message:
                    waiting.set_exception(AgentError(message["error"], reason="raised"))
                else:
                    waiting.set_result(message["value"])
            case "ended" if episode:
                episode.end(message)
            case "failed" if episode:
                episode.fail(failure(message))
            case "stays":
                text = f"a function goes on {self._hang_limit:g} seconds after it was cancelled"
                logger.warning(
                    "%s: %s: its worker process is replaced, and ends with the %d others in it",
                    message["name"], text, len(self.episodes),
                )  # fmt: skip
                self.is_leaving = True
                if not self.episodes:
                    raise AgentError(text, reason="hung")
            case "hung":
                text = (
                    f"computes for longer than {self._hang_limit:g} seconds at {message['where']}"
                )
                if episode:
                    episode.fail(AgentError(text, reason="hung"))
                    text = f"another episode in its worker process {text}"
                raise AgentError(text, reason="died" if episode else "hung")

    def _call(self, message: Message, episode: RemoteEpisode | None) -> None:
        number, method, arguments = message["number"], message["method"], message["arguments"]
        try:
            if episode is None:
                raise AgentError("the episode has ended", reason="raised")
            branch = episode.branches[message["branch"]]
            match method:
                case "sample":
                    self._answer_later(number, sample(branch, arguments))
                case "observe":
                    self._answer_later(number, branch.observe(partial(self._make, number)))
                case "append":
                    self._answer(number, episode.append(branch, **arguments))
                case "fork":
                    self._answer(number, episode.fork(branch, **arguments))
        except Exception as error:
            self._refuse(number, error)

    def _answer(self, number: int, value: Any) -> None:
        self._send({"kind": "answer", "number": number, "value": value})

    def _refuse(self, number: int, error: Exception) -> None:
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERRORS]
        said = [*kinds, ""][0], str(error)
        self._send({"kind": "answer", "number": number, "error": said})

    def _answer_later(self, number: int, found: Awaitable[Any]) -> None:
        async def wait() -> None:
            try:
                self._answer(number, await found)
            except Exception as error:
                self._refuse(number, error)
            finally:
                del self._calls[number]

        self._calls[number] = asyncio.create_task(wait())

    async def _make(self, number: int) -> Any:
        """Have the worker compute the value of an observation."""
        self._makes[number] = asyncio.get_running_loop().create_future()
        self._send({"kind": "make", "number": number})
        try:
            return await self._makes[number]
        finally:
            del self._makes[number]


def _start(hang_limit: float) -> tuple[socket.socket, subprocess.Popen[bytes], int]:
    """Return our end of a socket, the process with the other end, and a pipe whose closing ends it."""
    ours, theirs = socket.socketpair()
    standard_input, held = os.pipe()
    module = f"{__package__}.worker_process"
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(theirs.fileno()), str(hang_limit)],
        stdin=standard_input,
        pass_fds=[theirs.fileno()],
    )
    os.close(standard_input)
    theirs.close()
    return ours, process, held


def _how(code: int) -> str:
    number = -code if code < 0 else code - 128
    return signal.Signals(number).name if number in signal.valid_signals() else f"exit code {code}"


class RemoteEpisode:
    """An attempt at a prompt, and its branches by their numbers in the worker."""

    def __init__(self, number: int, prompt: Prompt, turns: Turns):
        self.number, self.prompt = number, prompt
        self.branches = [turns]
        self.outcome: asyncio.Future[Episode] = asyncio.get_running_loop().create_future()

    @property
    def name(self) -> str:
        """The name of the episode, for messages."""
        return self.branches[0].episode.name

    def begins(self) -> Message:
        """Return the first message to the worker."""
        turns = self.branches[0]
        most = turns.episode.rules.max_context_len
        given = {"prompt": self.prompt, "request": turns.request, "max_context_len": most}
        return {"kind": "begin", "episode": self.number, **given}

    def end(self, said: Message) -> None:
        """Set the result from the worker's message that the function has returned."""
        branches = said["branches"]
        if not self.outcome.done():
            self.outcome.set_result(
                Episode(
                    trajectories=None if branches is None else [self.branches[n] for n in branches],
                    reward=said["reward"],
                    rewards=said["rewards"],
                    token_rewards=said["token_rewards"],
                    token_weights=said["token_weights"],
                    metrics=said["metrics"],
                    info=said["info"],
                )
            )

    def fail(self, error: Exception) -> None:
        """Set the error; the first of several counts."""
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def append(self, branch: Turns, more: Any) -> tuple[list[int], Sequence[PlacedImage]]:
        """Append to a branch; return the tokens that were given, and the images among them."""
        before = branch.trajectory
        branch.append(more)
        now = branch.trajectory
        return now.token_ids[len(before.token_ids) :].tolist(), now.images[len(before.images) :]

    def fork(self, branch: Turns, length: int | None, key: str | None) -> Message:
        """Fork a branch; return the worker's description of the new branch."""
        made = branch.fork(length, key=key)
        self.branches.append(made)
        key, length = made.trajectory.forks[-1]
        seed = made.request.sampling_seed
        return {"branch": len(self.branches) - 1, "length": length, "key": key, "seed": seed}


async def sample(branch: Turns, arguments: Mapping[str, Any]) -> Message:
    """Have the policy go on; return the answer, without what only training reads, to the worker."""
    answer = await branch.sample(**arguments)
    said: Message = {
        "answer": replace(answer, kept_tokens=[], row_digests=[], likeliest=[], read=str),
        "temperature": branch.trajectory.temperatures[-1] if answer.token_ids else 0.0,
        "text": None,
    }
    try:
        said["text"] = answer.text
    except ValueError as error:  # there is no tokenizer
        said["no_text"] = str(error)
    return said


def failure(said: Message) -> AgentError:
    """Return the error in a worker's message about a function that failed."""
    error = AgentError(said["text"], reason=said["reason"])
    error.add_note(said["trace"])
    return error
