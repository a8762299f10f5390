"""Batching of requests to one server: those that start within a moment share one HTTP call.

Each is answered as soon as the server is done with it (`sglang_patches/generate_each.py`). A call
of its own costs both ends more than an answer of a few tokens does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

PATH = "/generate_each"

MOMENT = 0.001
"""Seconds without another request after which the call is made."""

MOST_MOMENTS = 20
"""The most such moments that a call waits."""

MOST_TOKENS = 1 << 16
"""The most prompt tokens in a call before the last request: a server parses all of them first."""

Answer = tuple[int, Any]
"""The HTTP status, and the decoded body."""


class Burst:
    """A call that is about to be made, or under way."""

    def __init__(
        self, send: Callable[[list[dict[str, Any]]], Any], leave: Callable[[Burst], object]
    ):
        """Take `send`, which makes the call and returns an asynchronous context of its response,
        and `leave`, which is called with this burst when no request may join any more."""
        self._send, self._leave = send, lambda: leave(self)
        self._asked: list[dict[str, Any]] = []
        self._answers: list[asyncio.Future[Answer]] = []
        self._num_tokens = 0
        self._task: asyncio.Task[None] | None = None

    async def ask(self, payload: dict[str, Any]) -> Answer:
        """Send this request with the others and return its answer. Raises the error of the call."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked.append(payload)
        self._answers.append(answer)
        self._num_tokens += len(payload["input_ids"])
        if self._num_tokens >= MOST_TOKENS:
            self._leave()
        self._task = self._task or asyncio.create_task(self._work())
        try:
            return await answer
        finally:
            if all(each.cancelled() for each in self._answers):
                self._task.cancel()

    async def _work(self) -> None:
        failure: Exception = aiohttp.ClientPayloadError("the answer ended before all were answered")
        try:
            await self._gather()
            async with self._send(self._asked) as response:
                await self._hear(response)
        except Exception as error:
            failure = error
        finally:
            self._leave()
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(failure)

    async def _gather(self) -> None:
        """Wait until no more requests join."""
        count = 0
        for _ in range(MOST_MOMENTS):
            if count == len(self._asked) or self._num_tokens >= MOST_TOKENS:
                break
            count = len(self._asked)
            await asyncio.sleep(MOMENT)
        self._leave()

    async def _hear(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            told = await response.json()
            for place in range(len(self._answers)):
                self._tell(place, response.status, told)
            return
        async for line in _lines(response.content):
            for answer in json.loads(line):
                self._tell(*answer)

    def _tell(self, place: int, status: int, told: Any) -> None:
        if not self._answers[place].done():  # whoever asked may have given up
            self._answers[place].set_result((status, told))


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a body, however long they are."""
    parts: list[bytes] = []
    async for chunk in content.iter_any():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join((*parts, end))
            parts = []
        parts.append(rest)
