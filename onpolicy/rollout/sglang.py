"""Group of SGLang servers, started by the run or already running elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args
from weakref import WeakKeyDictionary

import aiohttp

from onpolicy.config.groups import EngineConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError, ContractError, EngineError
from onpolicy.rollout.base import EnginesRestartedError, MemoryKind, RolloutGroup, SamplingJob
from onpolicy.rollout.client import EngineClient, EngineLostError
from onpolicy.rollout.dispatch import Dispatch, EngineOf
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.rollout.server import EngineServer, MakeServer, make_servers
from onpolicy.trajectory import Completion

logger = logging.getLogger(__name__)

_HEALTH_PAUSE = 0.5
"""Seconds between a bad health check and the next."""

KINDS: frozenset[MemoryKind] = frozenset(get_args(MemoryKind))

MakeClient = Callable[[str, str, float, float, str], EngineClient]


class SglangGroup(RolloutGroup):
    """A rollout group that spreads requests over servers and restarts the dead ones.

    `specs`: one for each server that it starts; with --rollout-server-url the first describes the
    servers that must be there.
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
        self._engine_of: EngineOf = WeakKeyDictionary()

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
        """Start the server, and take over its URL: if its host has left the cluster, it moves to
        another."""
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
            if self._spec.serves_text and not report["serves_text"]:
                raise ConfigError(
                    f"{client.url}: has no tokenizer (--skip-tokenizer-init), and the stop strings of "
                    "agents and environments are found in text. Start it without that flag."
                )

    def _require_cache(self, client: EngineClient, found: int) -> None:
        """Raise ConfigError if the cache is too small: SGLang shrinks it silently where memory is
        short."""
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
            lost = await Dispatch(
                job,
                self.clients,
                session,
                most=self.config.rollout_max_concurrency,
                watch=self._watch,
                on_progress=lambda done, tokens: self.on_progress(done, tokens),
                engine_of=self._engine_of,
            ).run()
        self._end_sampling = lambda: None
        return lost

    async def _watch(self, client: EngineClient, session: aiohttp.ClientSession) -> None:
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
                    f"{self.config.rollout_health_timeout:g} s."
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
