"""Code of a worker process: hundreds of episodes in one event loop.

A branch of an episode is a proxy here (`RemoteTurns`); the real branch lives in the run's process.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from onpolicy.agents.function import Function, load_agent, run_function
from onpolicy.agents.worker_messages import ERRORS, Message, Parser, from_worker
from onpolicy.errors import AgentError, ConfigError
from onpolicy.rollout.failures import ContextExceededError
from onpolicy.rollout.rollouter import ByToken, Episode
from onpolicy.rollout.turns import Turns
from onpolicy.system.user_functions import describe
from onpolicy.trajectory import Completion, Trajectory
from onpolicy.types import Request, Term

Json = Any

_BEATS = 4
"""Heartbeats per hang limit."""


def serve(descriptor: int, hang_limit: float) -> None:
    """Run episodes for the run at the other end of a socket, until it closes the socket."""
    link = Link(socket.socket(fileno=descriptor))
    asyncio.run(Worker(link, hang_limit).run())


class Worker:
    """The episodes of this process, and their pending calls to the run."""

    def __init__(self, link: Link, hang_limit: float):
        self._link, self._hang_limit = link, hang_limit
        self._function: Function | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Json]] = {}
        self._makes: dict[int, Callable[[], asyncio.Task[None]]] = {}
        self._others = set[asyncio.Task[None]]()
        self._over = asyncio.Event()
        self._ticked = time.monotonic()

    async def run(self) -> None:
        """Work until the run closes the socket."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.fileno(), self._read)
        threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        while not self._over.is_set():
            self._ticked = time.monotonic()
            self._link.send(kind="beat")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), self._hang_limit / _BEATS)

    def _read(self) -> None:
        try:
            for message in self._link.received(waits=False):
                self._take(message)
        except (EOFError, OSError):
            self._over.set()

    def _take(self, message: Message) -> None:
        match message["kind"]:
            case "load":
                self._load(message)
            case "begin":
                task = asyncio.create_task(self._roll_out(message))
                self._tasks[message["episode"]] = task
            case "cancel" if known := self._tasks.get(message["episode"]):
                known.cancel()
                loop = asyncio.get_running_loop()
                loop.call_later(self._hang_limit, self._say_if_it_stays, known, message["name"])
            case "make" if make := self._makes.get(message["number"]):
                making = make()
                self._others.add(making)
                making.add_done_callback(self._others.discard)
            case "answer" if waiting := self._answers.pop(message["number"], None):
                if waiting.done():
                    return
                if error := message.get("error"):
                    waiting.set_exception(_error(*error))
                else:
                    waiting.set_result(message["value"])

    def _say_if_it_stays(self, cancelled: asyncio.Task[None], name: str) -> None:
        if not cancelled.done():
            self._link.send(kind="stays", name=name)

    def _load(self, message: Message) -> None:
        try:
            self._function = load_agent(message["path"], message["flag"], message["arguments"])
        except ConfigError as error:
            self._link.send(kind="unusable", text=str(error))
        else:
            self._link.send(kind="ready")

    async def _roll_out(self, message: Message) -> None:
        number, prompt = message["episode"], message["prompt"]
        trajectory = Trajectory.begin(prompt.prompt_ids, prompt.images)
        most = message["max_context_len"]
        turns = RemoteTurns(self, number, 0, message["request"], trajectory, (), most)
        assert self._function is not None
        try:
            episode = await run_function(self._function, turns, prompt)
            self._link.send(kind="ended", episode=number, **_said(episode))
        except AgentError as error:
            exceeds = isinstance(error.__cause__, ContextExceededError)
            self._fail(number, "context" if exceeds else error.reason, str(error), error)
        except (TypeError, ValueError) as error:
            self._fail(number, "result", f"returned what JSON cannot say: {error}", error)
        except asyncio.CancelledError as error:  # perhaps by the run, which does not listen then
            self._fail(number, "raised", "raised CancelledError", error)
        finally:
            self._tasks.pop(number, None)

    def _fail(self, episode: int, reason: str, text: str, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error.__cause__ or error))
        self._link.send(kind="failed", episode=episode, reason=reason, text=text, trace=trace)

    def ask(self, **message: Json) -> tuple[int, asyncio.Future[Json]]:
        """Send a call; return its number, and the future of its answer."""
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = future
        try:
            self._link.send(kind="call", number=number, **message)
        except BaseException:
            del self._answers[number]
            raise
        return number, future

    def wait_for(self, future: asyncio.Future[Json]) -> Json:
        """Block the event loop until there is the answer."""
        while not future.done():
            for message in self._link.received(waits=True):
                self._take(message)
        return future.result()

    def give_up(self, number: int) -> None:
        """Withdraw a call whose answer nobody waits for."""
        self._answers.pop(number, None)
        self._link.send(kind="withdraw", number=number)

    async def made(self, number: int, make: Callable[[], Awaitable[Json]]) -> None:
        """Send the result of `make`, or the error if it has none that can be sent."""
        try:
            value = await make()
            self._link.send(kind="made", number=number, value=value)
        except BaseException as error:
            self._link.send(kind="made", number=number, error=describe(error))

    def on_make(self, number: int, make: Callable[[], asyncio.Task[None]] | None) -> None:
        """Set the callback for a call whose value the run does not know; None removes it."""
        if make is None:
            self._makes.pop(number, None)
        else:
            self._makes[number] = make

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report, in a thread, the episode that blocks the event loop, and where."""
        while True:
            time.sleep(self._hang_limit / _BEATS)
            if self._link.is_waiting:
                self._ticked = time.monotonic()
            elif time.monotonic() - self._ticked > self._hang_limit:
                task = asyncio.current_task(loop)
                found = (number for number, each in [*self._tasks.items()] if each is task)
                self._link.send(kind="hung", episode=next(found, -1), where=_place())
                return


def _place() -> str:
    """Return the place of the main thread: the innermost call outside Python's own library."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    calls = traceback.extract_stack(frame)
    own = [c for c in calls if "/lib/python3" not in c.filename and "<frozen" not in c.filename]
    call = (own or calls)[-1]
    return f"{call.filename}, line {call.lineno}, in {call.name}"


def _error(kind: str, text: str) -> Exception:
    return ERRORS[kind](text) if kind in ERRORS else AgentError(text, reason="raised")


def _said(episode: Episode) -> Message:
    branches = episode.trajectories
    if not all(isinstance(each, RemoteTurns) for each in branches or ()):
        raise ValueError("trajectories must be turns: the first, or forks of it")
    return {
        "branches": None if branches is None else [each.number for each in branches],  # type: ignore[union-attr]
        "reward": episode.reward,
        "rewards": None if episode.rewards is None else [*episode.rewards],
        "token_rewards": _lists(episode.token_rewards),
        "token_weights": _lists(episode.token_weights),
        "metrics": {**episode.metrics},
        "info": {**episode.info},
    }


def _lists(by_token: ByToken | Mapping[Term, ByToken] | None) -> Json:
    if isinstance(by_token, Mapping):
        return {term: _lists(each) for term, each in by_token.items()}
    return None if by_token is None else [[*each] for each in by_token]


class Link:
    """The worker's socket: any thread sends messages, and the event loop's thread receives them."""

    def __init__(self, connected: socket.socket):
        self._socket, self._lock = connected, threading.Lock()
        self._parser = Parser(pickle.loads)
        self.is_waiting = False
        """Whether the event loop is blocked until the run answers."""

    def send(self, **message: Json) -> None:
        """Send a message. Raises TypeError or ValueError for values that cannot be sent."""
        data = from_worker(message)
        with self._lock:
            self._socket.sendall(data)

    def received(self, *, waits: bool) -> list[Message]:
        """Return what came; `waits`: block for some bytes. Raises EOFError if the run is gone."""
        self.is_waiting = waits
        try:
            data = self._socket.recv(1 << 16, 0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        finally:
            self.is_waiting = False
        if not data:
            raise EOFError
        return [*self._parser.feed(data)]

    def fileno(self) -> int:
        return self._socket.fileno()


class RemoteTurns(Turns):
    """A branch whose changes go through its methods alone; each raises the error raised in the run.

    It belongs to the worker's event loop: no thread may use it.
    """

    def __init__(
        self,
        worker: Worker,
        number_of_episode: int,
        number: int,
        request: Request,
        trajectory: Trajectory,
        key: tuple[str, ...],
        max_context_len: int,
    ):
        rules = SimpleNamespace(max_context_len=max_context_len)
        of_run: Any = SimpleNamespace(past={}, rules=rules, number=number_of_episode)
        super().__init__(of_run, request, trajectory, key)
        self._worker, self.number = worker, number

    def _ask(self, method: str, **arguments: Json) -> tuple[int, asyncio.Future[Json]]:
        return self._worker.ask(
            episode=self.episode.number, method=method, branch=self.number, arguments=arguments
        )

    async def _answer_to(self, number: int, future: asyncio.Future[Json]) -> Json:
        try:
            return await future
        except asyncio.CancelledError:
            self._worker.give_up(number)
            raise

    async def sample(self, *, stop: Sequence[str] = (), **given: Any) -> Completion:
        stop = stop if isinstance(stop, str) else [*stop]
        said = await self._answer_to(*self._ask("sample", stop=stop, **given))
        answer: Completion = replace(said["answer"], read=lambda: _text(said))
        if answer.token_ids:
            self.trajectory = self.trajectory.plus(answer, said["temperature"]).answered()
        return answer

    def append(self, more: str | Sequence[int] | Sequence[Mapping[str, Json]]) -> None:
        more = more if isinstance(more, str) else [*more]
        said = self._worker.wait_for(self._ask("append", more=more)[1])
        self.trajectory = self.trajectory.given(*said)

    def fork(self, length: int | None = None, *, key: str | None = None) -> RemoteTurns:
        said = self._worker.wait_for(self._ask("fork", length=length, key=key)[1])
        return RemoteTurns(
            self._worker,
            self.episode.number,
            said["branch"],
            replace(self.request, sampling_seed=said["seed"]),
            self.trajectory.forked(said["length"], said["key"]),
            (*self.key, said["key"]),
            self.episode.rules.max_context_len,
        )

    async def observe(self, make: Callable[[], Awaitable[Json]]) -> Json:
        raised = list[Exception]()

        async def keep() -> Json:
            try:
                return await make()
            except Exception as error:
                raised.append(error)
                raise

        # It may begin while another episode runs, but belongs to this one's context.
        context = contextvars.copy_context()

        def begin() -> asyncio.Task[None]:
            return asyncio.create_task(self._worker.made(number, keep), context=context)

        number, future = self._ask("observe")
        self._worker.on_make(number, begin)
        try:
            return await self._answer_to(number, future)
        except Exception:
            if raised:
                raise raised[0] from None
            raise
        finally:
            self._worker.on_make(number, None)


def _text(said: Mapping[str, Json]) -> str:
    text: str | None = said["text"]
    if text is None:
        raise ValueError(said["no_text"])
    return text
