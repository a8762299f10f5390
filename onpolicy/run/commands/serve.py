"""SGLang servers under a contract, for runs and clients elsewhere, which run until interrupted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from onpolicy.agents.gateway.launch import make_gateway, require_parsers
from onpolicy.cluster.engine_host import make_server
from onpolicy.cluster.engine_places import Places
from onpolicy.config.groups import EngineConfig, template_options
from onpolicy.config.tools import ServeConfig
from onpolicy.errors import ConfigError, EngineError
from onpolicy.models.grammars import require_held
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.models.weight_files import quantised_by, require_fit
from onpolicy.rollout.client import EngineClient
from onpolicy.rollout.engine_args import CONTEXT_MARGIN, EngineSpec
from onpolicy.rollout.episode_rules import EpisodeRules
from onpolicy.rollout.flag_check import FlagCheck
from onpolicy.rollout.server import EngineServer, make_servers, open_private, require_place
from onpolicy.run.commands.sessions import ServedSessions
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import serve_spec
from onpolicy.run.launch.memory_checks import Needs, require_memory
from onpolicy.run.launch.memory_model import server_memory
from onpolicy.run.launch.stop_tokens import stop_token_ids
from onpolicy.system.network import free_port
from onpolicy.types import SamplingParams

logger = logging.getLogger(__name__)

START_SECONDS = 3600.0
"""The seconds that a server may take to start: long, since only the user who started it waits."""


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
            require_fit(model.hf_checkpoint, hf_config, model.trust_remote_code)
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
    size = ModelSize.of(hf_config, model.trust_remote_code, spec.contract.adapter)
    return Needs(lambda _, servers: [server_memory(spec, size, hf_config, servers)])


def serve(config: ServeConfig, spec: EngineSpec, places: Places) -> NoReturn:
    """Start the servers in their places, print how to use them, and watch them.

    Raises EngineError if one ends by itself.
    """
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
    spec, limits = servers[0].spec, EngineConfig()
    seconds = limits.rollout_request_timeout, limits.rollout_health_timeout
    sessions = ServedSessions(
        make_gateway(config.gateway, tokenizer, stops, options),
        [EngineClient(server.url, spec.api_key, *seconds) for server in servers],
        api_keys=(spec.client_api_key or spec.api_key, spec.api_key),
        params=SamplingParams(temperature=1.0, max_new_tokens=room, stop_token_ids=stops),
        rules=EpisodeRules(
            max_context_len=room - CONTEXT_MARGIN,
            on_failure="drop",
            decode=tokenizer.decode,
            require_grammar=partial(require_held, contract=spec.contract),
        ),
        seed=config.seed,
        time_limit=config.gateway.session_time_limit,
    )
    sessions.start()
    try:
        yield sessions
    finally:
        sessions.close()


class KeyFiles:
    """The files with the two keys: the user's, or our own ones, which are removed at the end."""

    def __init__(self, config: ServeConfig, spec: EngineSpec, directory: Path):
        self._own: dict[Path, str] = {}
        self.of_runs = self._file(
            config.server.rollout_api_key, directory / "api_key", spec.api_key
        )
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


def _print_how_to_use(
    servers: Sequence[EngineServer], keys: KeyFiles, sessions: ServedSessions | None
) -> None:
    spec, urls = servers[0].spec, [server.url for server in servers]
    print(
        f"contract {spec.contract.fingerprint}; log {', '.join(str(s.log_file) for s in servers)}"
    )
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
