"""Handle of one worker process: start, serve, watch, and end it.

All of it but `end` belongs to the event loop of the episodes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from onpolicy.agents.messages import ERRORS, Message, Parser, from_run
from onpolicy.agents.remote_episode import RemoteEpisode, failure, sample
from onpolicy.errors import AgentError, ConfigError, in_one_line
from onpolicy.rollout.episodes import Episode

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""The most seconds for a worker to import the function."""

_MISSES = 8
"""Silent intervals in a row that count as hanging; an interval is a quarter of the hang limit."""


@dataclass(frozen=True, kw_only=True)
class AgentFunction:
    """A user's function, as a worker finds it."""

    path: str
    """package.module.function or path/to/file.py:function"""

    flag: str = "--custom-generate-function-path"
    """The flag that names it, for messages."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments, besides turns and prompt."""


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
            text = "its worker process stands still: a function computes and lets no thread go on"
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
