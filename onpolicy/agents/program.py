"""Episodes by a program of the user's, in any language, which acts through its gateway session.

A program reads the session's address and the prompt's row, and may print its reward, on a line of its
own: `{"reward": 1.0, "api_key": KEY}`. The session's key tells its word from the policy's text, which
agents print too. Everything else that it prints is dropped, but for the last of it when it fails.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast
from urllib.parse import urlsplit

from onpolicy.agents.agent_workers import AgentFunction
from onpolicy.agents.session_address import SESSION, SessionAddress, session_of
from onpolicy.errors import AgentError, ConfigError, visible
from onpolicy.rollout.rollouter import Episode
from onpolicy.system.json_values import default
from onpolicy.types import Prompt

logger = logging.getLogger(__name__)

FLAG = "--agent-command"

MOST_LINE, MOST_SAID = 1 << 20, 2000
"""The most bytes of a printed line that are read, and of a failed program's last words."""

MOST_VARIABLE = 128 << 10
"""The most bytes of an environment variable with its name (Linux's MAX_ARG_STRLEN)."""

PATIENCE = 2.0
"""Seconds for the output of an ended program, which children in sessions of their own may hold open."""

_OUTPUT = 1


def program_function(command: Sequence[str], *, repeats: bool, flag: str = FLAG) -> AgentFunction:
    """Return the function that plays an episode by a program; workers run it.

    repeats: whether the program plays one episode after another."""
    given = {"command": [*command], "repeats": repeats}
    return AgentFunction(path=f"{__name__}.roll_out", flag=flag, arguments=given)


def command_of(text: str, flag: str = FLAG) -> list[str]:
    """Return the words of a command, as a shell splits them. Raises ConfigError if it cannot start."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{flag}={text}: {error}. Quote its words as for a shell.") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"{flag}={text}: there is no program {''.join(words[:1])!r} that can be executed. Give its "
            "path, from the directory of the run, or a name that PATH finds."
        )
    return words


async def roll_out(turns: Any, prompt: Prompt, *, command: list[str], repeats: bool) -> Episode:
    """Return the episode that a program plays. Raises AgentError where it fails."""
    session, row = session_of(prompt), row_of(prompt)
    program = _idle_program(command) if repeats else None
    if program is None:
        program = await _started(command, environment_of(session, None if repeats else row))
    try:
        episode = await program.play(session.api_key, row, is_last=not repeats)
    except BaseException:
        program.end()
        raise
    if program.is_over:
        program.end()
    else:
        _idle[tuple(command)].append(program)
    return episode


def row_of(prompt: Prompt) -> str:
    """Return the line that a program reads: the session's address and the prompt, as JSON."""
    session = session_of(prompt)
    said = {
        "base_url": session.base_url,
        "api_key": session.api_key,
        "model": session.model,
        "prompt": prompt.text,
        "messages": prompt.messages,
        "label": prompt.label,
        "metadata": {key: value for key, value in prompt.metadata.items() if key != SESSION},
    }
    return json.dumps(said, default=default)


def environment_of(session: SessionAddress, row: str | None) -> dict[str, str]:
    """Return the environment of a program: that of the run, which proxies the gateway no more, and, for
    one episode with a `row`, its session's address under the names that clients read. ONPOLICY_ROW is
    left out where Linux takes none so long."""
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    direct = ",".join(filter(None, [direct, urlsplit(session.base_url).hostname]))
    environment = {**os.environ, "NO_PROXY": direct, "no_proxy": direct}
    if row is None:
        return environment
    if len(row) + len("ONPOLICY_ROW=") < MOST_VARIABLE:
        environment["ONPOLICY_ROW"] = row
    return {
        **environment,
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "OPENAI_MODEL": session.model,
        "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": session.api_key,
    }


_idle = defaultdict[tuple[str, ...], list["Program"]](list)
"""The programs of this process that wait for their next episode, by their commands."""


def _idle_program(command: Sequence[str]) -> Program | None:
    while waiting := _idle[tuple(command)]:
        program = waiting.pop()
        if not program.is_over:
            return program
        logger.warning(
            "a program has ended, or printed an answer, between two episodes; another takes its place"
        )
        program.end()
    return None


async def _started(command: Sequence[str], environment: Mapping[str, str]) -> Program:
    try:
        _, program = await asyncio.get_running_loop().subprocess_exec(
            Program, *command, env=environment, start_new_session=True
        )
    except OSError as error:
        raise AgentError(f"could not start {command[0]}: {error}", reason="raised") from error
    return program


class Program(asyncio.SubprocessProtocol):
    """A program under way, in a session and process group of its own."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._silent: asyncio.Future[None] = loop.create_future()
        self._answered: asyncio.Future[None] = loop.create_future()
        self._key = ""
        self._answers: list[Any] = []
        self._line = bytearray()
        self._said = {1: b"", 2: b""}

    async def play(self, key: str, row: str, *, is_last: bool) -> Episode:
        """Have the program play an episode, until it answers, or, if `is_last`, until it ends.

        Raises AgentError if it ends badly or answers wrongly."""
        self._key, self._answers = key, []
        self._answered = asyncio.get_running_loop().create_future()
        given = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))
        given.write(f"{row}\n".encode())
        if is_last:
            given.write_eof()
        waited = {self._ended} if is_last else {self._ended, self._answered}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            self._kill_group()
            await asyncio.wait({self._silent}, timeout=PATIENCE)
            self._take(bytes(self._line))
            code = self._transport.get_returncode() or 0
            if code or not (is_last or self._answers):
                raise AgentError(
                    f"ran a program that {self.fault}", reason="died" if code < 0 else "raised"
                )
        answers, self._key = self._answers, ""
        return episode_of(answers, key)

    @property
    def is_over(self) -> bool:
        """Whether the program plays no further episode: it has ended, or has answered unasked."""
        if self._ended.done() or (not self._key and len(self._answers) > 1):
            return True
        try:  # asyncio hears of an end later
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._transport.get_pid(), how) is not None
        except ChildProcessError:
            return True

    @property
    def fault(self) -> str:
        """The end of the program, with the last line that it printed. Example: 'ended with exit code
        1, and printed last: KeyError'"""
        code = self._transport.get_returncode() or 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        lines = (self._said[2].strip() or self._said[1].strip()).decode(errors="replace")
        last = visible(lines.replace("\r", "\n").rpartition("\n")[2])[-300:]
        early = "" if code else " before it answered"
        return f"ended with {how}{early}" + (f", and printed last: {last}" if last else "")

    def end(self) -> None:
        """Kill the program and its process group."""
        self._kill_group()
        self._transport.close()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        more = cast(bytes, data)
        self._said[fd] = (self._said[fd] + more[-MOST_SAID:])[-MOST_SAID:]
        if fd == _OUTPUT:
            *whole, rest = more.split(b"\n")
            for line in whole:
                self._line += line[: MOST_LINE - len(self._line)]
                self._take(bytes(self._line))
                self._line.clear()
            self._line += rest[: MOST_LINE - len(self._line)]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == _OUTPUT and not self._silent.done():
            self._silent.set_result(None)

    def process_exited(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _take(self, line: bytes) -> None:
        """Keep a printed line if it is an answer: an object with a reward or a session's key."""
        said = None
        if line.lstrip().startswith(b"{"):
            with suppress(ValueError, RecursionError):
                said = json.loads(line)
        names_key = bool(self._key) and self._key.encode() in line
        if (isinstance(said, dict) and {"reward", "api_key"} & said.keys()) or names_key:
            self._answers.append(said)
            if not self._answered.done():
                self._answered.set_result(None)


def episode_of(answers: Sequence[Any], key: str) -> Episode:
    """Return the episode that a program's answers mean: none of them leaves the reward to the run.

    Raises AgentError for two, for one without the session's key, and for values that do not fit."""
    if not answers:
        return Episode()
    if len(answers) > 1:
        raise _wrong(f"{len(answers)} rewards, and an episode has one")
    said = answers[0]
    if not isinstance(said, dict):
        raise _wrong(f"its key in a line that is no JSON object of at most {MOST_LINE} bytes")
    if said.pop("api_key", None) != key:
        raise _wrong(
            'a reward without the key of its session. Print {"reward": ..., "api_key": ...}'
        )
    if unknown := said.keys() - {"reward", "metrics", "info"}:
        raise _wrong(f"an answer with {sorted(unknown)}: it may have reward, metrics and info")
    for name in ("metrics", "info"):
        if not isinstance(said.get(name, {}), dict):
            raise _wrong(f"{name}={said[name]!r:.80}, which must be an object")
    reward = said.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float | None):
        raise _wrong(f"reward={reward!r:.80}, which must be a number or null")
    return Episode(**said)


def _wrong(text: str) -> AgentError:
    return AgentError(f"ran a program that printed {text}", reason="result")
