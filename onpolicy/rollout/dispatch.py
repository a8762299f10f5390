"""Dispatch of a job's requests to live engines until the job is done."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, MutableMapping, Sequence
from contextlib import suppress

import aiohttp

from onpolicy.rollout.base import Progress, SamplingJob
from onpolicy.rollout.client import EngineClient, EngineLostError

logger = logging.getLogger(__name__)

EngineOf = MutableMapping[Hashable, EngineClient]
"""The engine that last answered under each key; its cache holds that prefix."""

Watch = Callable[[EngineClient, aiohttp.ClientSession], Awaitable[None]]
"""A coroutine that raises EngineLostError as soon as the engine counts as dead."""


class Dispatch:
    """A set of engines at work on one job, each with at most `most` requests at a time."""

    def __init__(
        self,
        job: SamplingJob,
        clients: Sequence[EngineClient],
        session: aiohttp.ClientSession,
        *,
        most: int,
        watch: Watch,
        on_progress: Progress,
        engine_of: EngineOf,
    ):
        self._job, self._session, self._most, self._watch = job, session, most, watch
        self._on_progress, self._engine_of = on_progress, engine_of
        self._under_way = {client: dict[int, asyncio.Task[None]]() for client in clients}
        self._lost: list[EngineClient] = []
        self._num_seen = len(job.requests)
        self._waiting = deque(number for number in job.missing if number < self._num_seen)
        self._news = asyncio.Event()
        self._error: BaseException | None = None

    async def run(self) -> list[EngineClient]:
        """Work until the job is done or interrupted or no engine is left; return the engines that
        were lost."""
        loop = asyncio.get_running_loop()
        beside = [asyncio.create_task(self._stand_by(client)) for client in self._under_way]

        def wake() -> None:
            with suppress(RuntimeError):  # the work has ended meanwhile
                loop.call_soon_threadsafe(self._news.set)

        self._job.on_news = wake
        try:
            while self._under_way and not self._is_over():
                self._send()
                await self._news.wait()
                self._news.clear()
        finally:
            sent = [task for tasks in self._under_way.values() for task in tasks.values()]
            for task in (*sent, *beside):
                task.cancel()
            await asyncio.gather(*sent, *beside, return_exceptions=True)
        return self._lost

    def _is_over(self) -> bool:
        """Return whether the work is over. Raises the error that occurred, if one did."""
        if error := self._error or self._job.error:
            raise error
        if self._job.is_interrupted:
            return not any(self._under_way.values())
        return self._job.is_done

    def _send(self) -> None:
        if self._job.is_interrupted:
            return
        num_asked = len(self._job.requests)
        self._waiting.extend(range(self._num_seen, num_asked))
        self._num_seen = num_asked
        while self._waiting and (client := self._client_for(self._waiting[0])) is not None:
            number = self._waiting.popleft()
            asked = asyncio.create_task(self._ask(client, number))
            self._under_way[client][number] = asked

    def _client_for(self, number: int) -> EngineClient | None:
        """Return the engine that has the request's prefix cached, or the one with the fewest
        requests."""
        kept = self._job.stays_with(number)
        known = None if kept is None else self._engine_of.get(kept)
        if known in self._under_way and len(self._under_way[known]) < self._most:
            return known
        idlest = min(self._under_way, key=lambda client: len(self._under_way[client]))
        return idlest if len(self._under_way[idlest]) < self._most else None

    async def _ask(self, client: EngineClient, number: int) -> None:
        job = self._job
        try:
            request = job.requests[number]
            completion = await client.generate(self._session, request, job.takes_parts)
            if (kept := job.stays_with(number)) is not None:
                self._engine_of[kept] = client
            job.add(number, completion)
            self._on_progress(job.num_done, len(completion.response_ids))
        except EngineLostError as error:
            self._lose(client, error)
        except Exception as error:
            self._error = error
        finally:
            self._under_way.get(client, {}).pop(number, None)
            self._news.set()

    async def _stand_by(self, client: EngineClient) -> None:
        """Watch the engine, and abort its requests once the job is interrupted."""
        beside = [self._watch(client, self._session)]
        if self._job.takes_parts:
            beside.append(client.abort_when(lambda: self._job.is_interrupted, self._session))
        try:
            await asyncio.gather(*beside)
        except EngineLostError as error:
            self._lose(client, error)
        except Exception as error:
            self._error = error
        finally:
            self._news.set()

    def _lose(self, client: EngineClient, error: EngineLostError) -> None:
        """Give the requests of a lost engine to the others."""
        if client not in self._under_way:
            return
        logger.error("%s", error)
        undone = self._under_way.pop(client)
        self._lost.append(client)
        self._waiting.extend(undone)
        for task in undone.values():
            if task is not asyncio.current_task():
                task.cancel()
