"""Group of SGLang servers, started by the run or already running elsewhere.

`Dispatch` gives a job's requests to the live engines until the job is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args
from weakref import WeakKeyDictionary

import aiohttp

from onpolicy.config.groups import EngineConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError, ContractError, EngineError
from onpolicy.rollout.base import EnginesRestartedError, MemoryKind, RolloutGroup, SamplingJob
from onpolicy.rollout.client import EngineClient, EngineLostError
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.rollout.server import EngineServer, MakeServer, make_servers
from onpolicy.system.open_files import BESIDE, allow_connections
from onpolicy.trajectory import Completion

logger = logging.getLogger(__name__)

_HEALTH_PAUSE = 0.5
"""Seconds between a bad health check and the next."""

KINDS: frozenset[MemoryKind] = frozenset(get_args(MemoryKind))

MakeClient = Callable[[str, str, float, float, str], EngineClient]


class SglangGroup(RolloutGroup):
    """A rollout group that spreads requests over servers and restarts the dead ones.

    `specs`: one for each server; with --rollout-server-url the first describes them all.
    """

    def __init__(
        self,
        config: EngineConfig,
        specs: Sequence[EngineSpec],
        log_directory: Path,
        *,
        make_server: MakeServer = EngineServer,
        make_client: MakeClient = EngineClient,
    ):
        spec = self._spec = specs[0]
        self.config, self.contract = config, spec.contract
        self.servers: list[EngineServer] = []
        self.on_progress = lambda done, tokens: None
        self._self_check: dict[str, str] = {}
        self._restarts_left = config.rollout_max_restarts
        self._stopped = False
        self._end_sampling: Callable[[], object] = lambda: None
        if not config.rollout_server_url:
            port = config.rollout_base_port
            self.servers = make_servers(specs, port, log_directory, make_server)
        urls = config.rollout_server_url or [server.url for server in self.servers]
        _allow_requests(config.rollout_max_concurrency, len(urls))
        self.clients = [
            make_client(
                url,
                spec.api_key,
                config.rollout_request_timeout,
                config.rollout_health_timeout,
                spec.admin_api_key,
            )
            for url in urls
        ]
        self._server_of = dict(zip(self.clients, self.servers, strict=False))
        self._given_back: dict[EngineClient, frozenset[MemoryKind]] = {}
        self.engine_of: MutableMapping[Hashable, EngineClient] = WeakKeyDictionary()
        """The engine that last answered under each key; its cache holds that prefix."""

    def launch(self) -> None:
        for server in self.servers:
            self._start(server)
            logger.info("starting an SGLang server; its log: %s", server.log_file)
        if self.config.colocate:
            # SGLang takes a part of what is free, so it measures before the trainer allocates.
            logger.info("waiting for the servers, which share GPUs with the trainer")
            for server in self.servers:
                server.wait_until_healthy(self.config.rollout_start_timeout)

    def _start(self, server: EngineServer) -> None:
        """Start the server, and take over its URL: it may have moved to another host."""
        server.start()
        self.clients[self.servers.index(server)].url = server.url

    def connect(self, self_check: dict[str, str]) -> None:
        self._self_check = self_check
        logger.info("waiting for %s", ", ".join(client.url for client in self.clients))
        # Servers that gave memory back compute nothing for a health check; `launch` waited for them.
        self._await_ready(self.clients, [] if self.config.colocate else self.servers)

    def _await_ready(
        self, clients: Sequence[EngineClient], servers: Sequence[EngineServer]
    ) -> None:
        for server in servers:
            server.wait_until_healthy(self.config.rollout_start_timeout)
        for client in clients:
            report = client.report()
            self._require_contract(client, report)
            self._require_cache(client, report["cache_tokens"])
            if self._spec.digests_rows and not report.get("digests_rows"):
                raise ConfigError(
                    f"{client.url}: digests no rows of log-probabilities, which are compared here "
                    "(--parity-check full). Start it with `onpolicy serve --row-digests`."
                )
            if self._spec.serves_text and not report["serves_text"]:
                raise ConfigError(
                    f"{client.url}: has no tokenizer (--skip-tokenizer-init), and the stop strings of "
                    "agents and environments are found in text. Start it without that flag."
                )

    def _require_cache(self, client: EngineClient, found: int) -> None:
        """Raise ConfigError for too small a cache: SGLang shrinks it where memory is short."""
        asked = self._spec.cache_tokens if client in self._server_of else 0
        if found < asked:
            raise ConfigError(
                f"{client.url}: --sglang-max-total-tokens={asked} are asked for, and the server found "
                f"memory for a cache of {found} tokens. Free some memory, ask for fewer tokens (the "
                f"longest sequence needs {self._spec.needed_tokens}), or raise "
                "--sglang-mem-fraction-static if you gave one."
            )
        if found < self._spec.needed_tokens:
            raise ConfigError(
                f"{client.url}: its cache holds {found} tokens, and the longest prompt and response "
                f"need {self._spec.needed_tokens}. Start it with more memory "
                "(--sglang-mem-fraction-static, --sglang-max-total-tokens), or sample shorter responses."
            )

    def _require_contract(self, client: EngineClient, report: dict[str, Any]) -> None:
        theirs = NumericsContract.from_json(report["contract"])
        if theirs.fingerprint != self.contract.fingerprint:
            raise ContractError(
                f"{client.url}: contract={theirs.fingerprint}, the trainer's is "
                f"{self.contract.fingerprint}. Theirs: {theirs.to_json()} Ours: "
                f"{self.contract.to_json()} Start it with the same checkpoint, dtype, mode and "
                "--row-parallel-blocks."
            )
        checks = report.get("self_check", {})
        if differ := sorted(k for k, v in self._self_check.items() if checks.get(k) != v):
            raise ContractError(
                f"{client.url}: operators={differ} give other bits there than in the trainer. Both "
                "must run on the same kind of CPU with the same version of torch."
            )

    def generate(self, job: SamplingJob) -> list[Completion]:
        lost = asyncio.run(self._run(job))
        if lost:
            self._restart(lost, len(job.missing))
            raise EnginesRestartedError
        return job.completions

    async def _run(self, job: SamplingJob) -> list[EngineClient]:
        """Have all servers work on the job; return those that stopped answering."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._end_sampling = lambda: loop.call_soon_threadsafe(task.cancel)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            lost = await Dispatch(self, job, session).run()
        self._end_sampling = lambda: None
        return lost

    async def watch(self, client: EngineClient, session: aiohttp.ClientSession) -> None:
        """Raise EngineLostError as soon as the engine counts as dead."""
        while True:
            await asyncio.sleep(self.config.rollout_health_timeout / 6)
            await self._await_health(client, session)

    async def _await_health(self, client: EngineClient, session: aiohttp.ClientSession) -> None:
        """Wait for a good health check. Raises EngineLostError if there is none for too long."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        while not await client.is_healthy(session):
            server = self._server_of.get(client)
            if server is not None and not server.is_running:
                raise EngineLostError(f"{client.url}: its process has ended.")
            if loop.time() - started > self.config.rollout_health_timeout:
                raise EngineLostError(
                    f"{client.url} failed its health checks for "
                    f"{self.config.rollout_health_timeout:g} s. If it was busy, as where a host without "
                    "a GPU prefills many prompts, give a larger --rollout-health-timeout."
                )
            await asyncio.sleep(_HEALTH_PAUSE)

    def revive(self) -> bool:
        lost = asyncio.run(self._find_lost())
        if lost:
            self._restart(lost, num_undone=0)
        return bool(lost)

    async def _find_lost(self) -> list[EngineClient]:
        async with aiohttp.ClientSession() as session:
            answers = await asyncio.gather(*(self._answers(c, session) for c in self.clients))
        return [c for c, is_well in zip(self.clients, answers, strict=True) if not is_well]

    async def _answers(self, client: EngineClient, session: aiohttp.ClientSession) -> bool:
        try:
            await self._await_health(client, session)
        except EngineLostError as error:
            logger.error("%s", error)
            return False
        return True

    def _restart(self, lost: Sequence[EngineClient], num_undone: int) -> None:
        """Restart engines until all answer. Raises EngineError if that cannot be done."""
        servers = [self._server_of[client] for client in lost if client in self._server_of]
        down = f"engines down={[c.url for c in lost]}, requests without an answer={num_undone}: "
        if len(servers) < len(lost):
            raise EngineError(
                f"{down}onpolicy did not start them, so it cannot start them again. Start them with "
                "`onpolicy serve`, then this run again, with --load if it saves checkpoints."
            )
        for client in lost:
            self._given_back.pop(client, None)
        dead = servers
        while dead:
            self._start_again(dead, down)
            try:
                self._await_ready(lost, servers)
                dead = []
            except EngineError as error:
                dead = [server for server in servers if not server.is_running]
                if not dead:
                    raise
                logger.error("%s", error)

    def _start_again(self, servers: Sequence[EngineServer], down: str) -> None:
        if self._stopped:
            raise EngineError(f"{down}the run has ended.")
        if self._restarts_left < len(servers):
            tails = "".join(f"\n{s.log_file}:\n{s.log_tail()}" for s in servers)
            raise EngineError(
                f"{down}all --rollout-max-restarts={self.config.rollout_max_restarts} are used up. "
                f"Their logs may say why they died:{tails}"
            )
        self._restarts_left -= len(servers)
        for server in servers:
            logger.warning("starting %s again", server.url)
            server.stop()
            self._start(server)

    def release_memory(self) -> None:
        for client in self.clients:
            if kinds := KINDS - self._given_back.get(client, frozenset()):
                client.flush_cache()  # waits for a health check, in which SGLang's scheduler would end
                client.post("/release_memory_occupation", {"tags": sorted(kinds)})
                self._given_back[client] = KINDS

    def resume_memory(self, kind: MemoryKind) -> None:
        for client, kinds in self._given_back.items():
            if kind in kinds:
                client.post("/resume_memory_occupation", {"tags": [kind]})
                self._given_back[client] = kinds - {kind}

    def stop(self) -> None:
        self._stopped = True
        with contextlib.suppress(RuntimeError):  # it ended by itself meanwhile
            self._end_sampling()
        for server in self.servers:
            server.stop()


def _allow_requests(most: int, engines: int) -> None:
    """Let this process connect once for each request in flight. Raises ConfigError if it may not: an
    engine to which nothing connects would count as lost."""
    if (limit := allow_connections(engines * most)) is not None:
        raise ConfigError(
            f"--rollout-max-concurrency={most}: requests to {engines} engines may need {engines * most} "
            f"connections and {BESIDE} other files, and this process may open {limit} files. Raise that "
            "limit (ulimit -Hn), or give a smaller number."
        )


class Dispatch:
    """The engines of a group at work on one job, each with limited requests at a time."""

    def __init__(self, group: SglangGroup, job: SamplingJob, session: aiohttp.ClientSession):
        self._group, self._job, self._session = group, job, session
        self._most = group.config.rollout_max_concurrency
        self._under_way = {client: dict[int, asyncio.Task[None]]() for client in group.clients}
        self._lost: list[EngineClient] = []
        self._num_seen = len(job.requests)
        self._waiting = deque(number for number in job.missing if number < self._num_seen)
        self._news = asyncio.Event()
        self._error: BaseException | None = None

    async def run(self) -> list[EngineClient]:
        """Work until the job is over or no engine is left; return the engines that were lost."""
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
        """Return the engine that has the request's prefix, or the one with the fewest requests."""
        kept = self._job.stays_with(number)
        known = None if kept is None else self._group.engine_of.get(kept)
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
                self._group.engine_of[kept] = client
            job.add(number, completion)
            self._group.on_progress(job.num_done, len(completion.response_ids))
        except EngineLostError as error:
            self._lose(client, error)
        except Exception as error:
            self._error = error
        finally:
            self._under_way.get(client, {}).pop(number, None)
            self._news.set()

    async def _stand_by(self, client: EngineClient) -> None:
        """Watch the engine, and abort its requests once the job is interrupted."""
        beside = [self._group.watch(client, self._session)]
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
