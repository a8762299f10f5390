"""SGLang servers under a contract, for runs and clients elsewhere, which run until interrupted.

With --sessions, clients open and end sessions themselves, to try an agent without a run. A request
`POST /sessions` opens a session and returns its id, base URL and key. `DELETE /sessions/ID` ends it and
returns its samples. Both need the key of the servers that sample.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
from aiohttp import web

from onpolicy.agents.gateway.gateway_server import Gateway, OpenSession, has_key
from onpolicy.agents.gateway.gateway_start import make_gateway, require_parsers
from onpolicy.agents.gateway.refusals import RefusedError
from onpolicy.agents.gateway.session_rollouter import AgentRollouter
from onpolicy.cluster.engine_host import Places, make_server
from onpolicy.config.groups import EngineConfig, template_options
from onpolicy.config.tool_flags import ServeConfig
from onpolicy.errors import ConfigError, EngineError
from onpolicy.images.placing import ImagePlacer
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.models.weight_files import quantised_by, require_fit
from onpolicy.rollout.client import EngineClient
from onpolicy.rollout.engine_args import CONTEXT_MARGIN, EngineSpec, FlagCheck
from onpolicy.rollout.episode_loop import episode_loop
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.rollout.server import EngineServer, make_servers, open_private, require_place
from onpolicy.rollout.turns import EpisodeRules, Turns
from onpolicy.run.launch.cluster_engines import Needs
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import serve_spec
from onpolicy.run.launch.memory import require_memory, server_memory
from onpolicy.run.launch.stop_tokens import stop_token_ids
from onpolicy.system.network import free_port
from onpolicy.system.records import Shape
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt, Request, SamplingParams

logger = logging.getLogger(__name__)

_TRAJECTORY = Shape(Trajectory)

START_SECONDS = 3600.0
"""The seconds that a server may take to start: long, since only the user who started it waits."""


def serve(config: ServeConfig, spec: EngineSpec, places: Places) -> NoReturn:
    """Start the servers, print how to use them, and watch them. Raises EngineError if one ends."""
    directory = Path(config.run_dir).absolute()
    keys = KeyFiles(config, spec, directory)
    make = partial(make_server, elsewhere=places.elsewhere)
    port = config.server.rollout_base_port
    servers = make_servers(places.specs(spec), port, directory, make)
    try:
        for server in servers:
            server.start()
            logger.info("starting an SGLang server; its log: %s", server.log_file)
        keys.write()
        for server in servers:
            server.wait_until_healthy(START_SECONDS)
        with _sessions(config, servers) as sessions:
            _print_how_to_use(servers, keys, sessions)
            _keep(servers)
    finally:
        for server in servers:
            server.stop()
        keys.remove()


@contextmanager
def _sessions(
    config: ServeConfig, servers: Sequence[EngineServer]
) -> Iterator[ServedSessions | None]:
    """Serve the sessions of --sessions, if the flag is given."""
    if not config.gateway.sessions:
        yield None
        return
    path, trust = config.model.hf_checkpoint, config.model.trust_remote_code
    hf_config, tokenizer = load_config(path, trust), load_tokenizer(path, trust)
    stops = stop_token_ids(path, hf_config, tokenizer=tokenizer)
    room = hf_config.max_position_embeddings
    options = template_options(config.gateway.chat_template_kwargs)
    placer = ImagePlacer.of(config.model.tower_of, tokenizer)
    spec, limits = servers[0].spec, EngineConfig()
    seconds = limits.rollout_request_timeout, limits.rollout_health_timeout
    sessions = ServedSessions(
        make_gateway(config.gateway, tokenizer, stops, options, placer),
        [EngineClient(server.url, spec.api_key, *seconds) for server in servers],
        api_keys=(spec.client_api_key or spec.api_key, spec.api_key),
        params=SamplingParams(temperature=1.0, max_new_tokens=room, stop_token_ids=stops),
        rules=EpisodeRules(
            max_context_len=room - CONTEXT_MARGIN,
            on_failure="drop",
            decode=tokenizer.decode,
            holds_grammars=lambda: spec.contract.is_aligned,
        ),
        seed=config.seed,
        time_limit=config.gateway.session_time_limit,
    )
    sessions.start()
    try:
        yield sessions
    finally:
        sessions.close()


def _print_how_to_use(
    servers: Sequence[EngineServer], keys: KeyFiles, sessions: ServedSessions | None
) -> None:
    spec, urls = servers[0].spec, [server.url for server in servers]
    logs = ", ".join(str(server.log_file) for server in servers)
    print(f"contract {spec.contract.fingerprint}; log {logs}")
    if spec.serves_text:
        bases = " or ".join(f"{url}/v1" for url in urls)
        print(
            f"OpenAI clients: base_url {bases}, and what is in {keys.of_clients} as api_key (the key of "
            "runs, below, may change weights)"
        )
    if sessions is not None:
        print(f"sessions: POST {sessions.gateway.url}/sessions with the same key as Bearer token")
    print(f"--rollout-server-url {' '.join(urls)} --rollout-api-key @{keys.of_runs}", flush=True)


def _keep(servers: Sequence[EngineServer]) -> NoReturn:
    while True:
        for server in servers:
            if not server.is_running:
                raise EngineError(
                    f"{server.url} ended: {server.cause_of_death()}\nThe end of its log:\n"
                    f"{server.log_tail()}"
                )
        time.sleep(1)


class KeyFiles:
    """The files with the two keys: the user's, or our own ones, which are removed at the end."""

    def __init__(self, config: ServeConfig, spec: EngineSpec, directory: Path):
        self._own: dict[Path, str] = {}
        given = config.server.rollout_api_key
        self.of_runs = self._file(given, directory / "api_key", spec.api_key)
        self.of_clients = self.of_runs
        if spec.client_api_key:
            own = directory / "client_api_key"
            self.of_clients = self._file(config.client_api_key, own, spec.client_api_key)

    def _file(self, given: str, own: Path, key: str) -> str:
        if given.startswith("@"):
            return given[1:]
        self._own[own] = key
        return str(own)

    def write(self) -> None:
        """Write our own files, readable by their owner alone."""
        for file, key in self._own.items():
            with open(file, "w", opener=open_private) as written:
                written.write(f"{key}\n")

    def remove(self) -> None:
        """Remove our own files."""
        for file in self._own:
            file.unlink(missing_ok=True)


def checked_spec(config: ServeConfig) -> EngineSpec:
    """Return the spec of each server. Raises ConfigError if the servers could not run."""
    model, server = config.model, config.server
    hf_config = load_config(model.hf_checkpoint, model.trust_remote_code)
    if config.serves_text or config.gateway.sessions:
        load_tokenizer(model.hf_checkpoint, model.trust_remote_code)
    if config.gateway.sessions:
        require_parsers(config.gateway)
        _require_host(config.gateway.gateway_host)
    contract = contract_for(config, hf_config, aligned=config.plan.starts_aligned)
    spec = serve_spec(config, hf_config, contract)
    number = config.engines.rollout_num_engines
    require_place(server.rollout_host, server.rollout_base_port, number)
    with FlagCheck(spec) as flags:
        if not quantised_by(hf_config):  # SGLang's own kernels may serve a quantised checkpoint
            require_fit(model.hf_checkpoint, hf_config, model.trust_remote_code, sees=model.images)
        held = needs_of_servers(config, spec).held(0, number)
        require_memory(held, spec.contract.device, ray_address=config.cluster.ray_address)
        flags.require_passed()
    return spec


def _require_host(host: str) -> None:
    try:
        free_port(host)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--gateway-host={host}: no gateway can listen there ({error}). Give an address of this "
            "host, such as 127.0.0.1, or leave the flag out."
        ) from error


def needs_of_servers(config: ServeConfig, spec: EngineSpec) -> Needs:
    """Return the memory needs of the servers, on one host or on several."""
    model = config.model
    hf_config = load_config(model.hf_checkpoint, model.trust_remote_code)
    size = ModelSize.of(hf_config, model.trust_remote_code, spec.contract.adapter, model.tower_of)
    return Needs(lambda _, servers: [server_memory(spec, size, hf_config, servers)])


@dataclass(frozen=True, eq=False)
class ServedSessions:
    """The open sessions of one gateway. Samples are a function of `seed`, of the number of sessions
    opened before, and of the requests."""

    gateway: Gateway
    engines: Sequence[EngineClient]
    api_keys: Sequence[str]
    params: SamplingParams
    rules: EpisodeRules
    seed: int
    time_limit: float
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _known: dict[str, tuple[ServedSession, OpenEpisode]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gateway.routes = [
            web.post("/sessions", self._answered(self._open)),
            web.delete("/sessions/{name}", self._answered(self._end)),
        ]

    def start(self) -> None:
        """Start to listen. Raises OSError if the gateway cannot."""
        episode_loop().run(self.gateway.start)

    def close(self) -> None:
        """End all sessions and stop listening."""
        for _, episode in list(self._known.values()):
            episode.end()
        episode_loop().run(self.gateway.close)

    def _answered(self, handle: Callable[[web.Request], Any]) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.Response:
            try:
                if not has_key(request, *self.api_keys):
                    raise RefusedError(
                        401,
                        "Sessions are opened and ended with the key of the servers.",
                        code="invalid_api_key",
                    )
                return web.json_response(await handle(request))
            except RefusedError as refused:
                return web.json_response(refused.as_openai(), status=refused.status)

        return answer

    async def _open(self, _: web.Request) -> dict[str, str]:
        """Open a session with its own episode number, by which observations and failures are kept."""
        number = next(self._numbers)
        session = ServedSession(self.engines[number % len(self.engines)], self.time_limit)
        rollouter = AgentRollouter(lambda: self.gateway, session.act)
        seed = sampling_seed(self.seed, "session", number)
        request = Request(prompt_ids=[], sampling_seed=seed, params=self.params)
        prompt = Prompt(index=number, prompt_ids=[], label="", text="")
        episode = OpenEpisode(rollouter, prompt, request, self.rules, number=number)
        episode.go_on(session)
        opened = await _opened(session, episode)
        self._known[opened.name] = session, episode
        episode_loop().begin(partial(self._forget, opened.name, session))
        return {"id": opened.name, "base_url": opened.base_url, "api_key": opened.api_key}

    async def _forget(self, name: str, session: ServedSession) -> None:
        await session.has_ended.wait()
        _, episode = self._known[name]
        self.rules.observations.forget([episode.number])
        await asyncio.sleep(self.time_limit)
        del self._known[name]

    async def _end(self, request: web.Request) -> dict[str, Any]:
        name = request.match_info["name"]
        if (known := self._known.get(name)) is None:
            message = f"There is no session {name!r}, or it ended long ago."
            raise RefusedError(404, message, code="session_not_found")
        session, episode = known
        session.is_to_end.set()
        await session.has_ended.wait()
        first = next(iter(episode.samples or ()), None)
        return {
            "id": name,
            "trajectories": [self._written(each) for each in episode.trajectories],
            "metrics": first.metrics if first else {},
            "drifts": first.info.get("gateway/drifts", {}) if first else {},
            "failures": [failure.message for failure in episode.all_failures],
        }

    def _written(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return a trajectory as in checkpoints, with the text of each given and sampled stretch."""
        tokens = zip(trajectory.sampled, trajectory.token_ids, strict=True)
        turns = [
            {"sampled": is_sampled, "text": self.rules.decode([token for _, token in stretch])}
            for is_sampled, stretch in groupby(tokens, key=lambda token: token[0])
        ]
        return {**_TRAJECTORY.values(trajectory), "turns": turns}


class ServedSession:
    """An episode that is open until its client ends it, or for `time_limit` seconds."""

    def __init__(self, engine: EngineClient, time_limit: float):
        self._engine, self._time_limit = engine, time_limit
        self.opened: asyncio.Future[OpenSession] = asyncio.get_running_loop().create_future()
        self.is_to_end, self.has_ended = asyncio.Event(), asyncio.Event()

    async def act(self, opened: OpenSession, prompt: Prompt) -> None:
        """Keep the session open, in the place of an agent."""
        self.opened.set_result(opened)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.is_to_end.wait(), self._time_limit)

    def asked(self, branch: Turns) -> None:
        if (ask := branch.ask) is not None:
            episode_loop().begin(partial(self._answer, branch, ask))

    async def _answer(self, branch: Turns, ask: Request) -> None:
        """Have the engine sample all tokens of a request; pass an error on to the client that waits."""
        is_answered = False
        try:
            async with aiohttp.ClientSession() as connection:
                while not is_answered and branch.ask is ask:
                    request = branch.episode.request(branch, ask)
                    completion = await self._engine.generate(connection, request)
                    is_answered = branch.episode.add(branch, ask, completion)
        except Exception as error:  # else the client would wait for ever
            if branch.ask is ask:
                branch.episode.withdraw(branch, ask)
                branch.wake(error)

    def ended(self, episode: OpenEpisode) -> None:
        self.has_ended.set()


async def _opened(session: ServedSession, episode: OpenEpisode) -> OpenSession:
    """Return the session once it is open. Raises RefusedError if its episode failed before."""
    ended = asyncio.create_task(session.has_ended.wait())
    try:
        either: list[asyncio.Future[Any]] = [session.opened, ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
    if session.opened.done():
        return session.opened.result()
    why = episode.error or "; ".join(failure.message for failure in episode.failures)
    raise RefusedError(500, f"The session could not be opened: {why}", code="server_error")
