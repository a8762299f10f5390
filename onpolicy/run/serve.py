"""One SGLang server under a contract, for runs and clients elsewhere; kept until it is interrupted."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import NoReturn

from onpolicy.config.tools import ServeConfig
from onpolicy.errors import EngineError
from onpolicy.models.hf_config import load_config
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.models.weight_files import require_fit
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.rollout.flag_check import FlagCheck
from onpolicy.rollout.reach import require_place
from onpolicy.rollout.server import EngineServer, open_private
from onpolicy.run.contracts import contract_for
from onpolicy.run.engine_specs import serve_spec

logger = logging.getLogger(__name__)

START_SECONDS = 3600.0
"""How long the server may take to start: nobody waits for it but who started it."""


def checked_spec(config: ServeConfig) -> EngineSpec:
    """What the server is started with. Raises ConfigError for whatever it could not run."""
    model, server = config.model, config.server
    hf_config = load_config(model.hf_checkpoint, model.trust_remote_code)
    if config.serves_text:
        load_tokenizer(model.hf_checkpoint, model.trust_remote_code)
    contract = contract_for(config, hf_config, aligned=config.true_on_policy_mode)
    spec = serve_spec(config, hf_config, contract)
    require_place(server.rollout_host, server.rollout_base_port)
    with FlagCheck(spec) as flags:
        require_fit(model.hf_checkpoint, hf_config, model.trust_remote_code)
        flags.require_passed()
    return spec


def serve(config: ServeConfig, spec: EngineSpec) -> NoReturn:
    """Start the server, print how to use it, and keep it.

    Raises EngineError if it ends by itself.
    """
    directory = Path(config.run_dir).absolute()
    server = EngineServer(spec, config.server.rollout_base_port, directory / "engine.log")
    given = config.server.rollout_api_key
    own_key_file = None if given.startswith("@") else directory / "api_key"
    try:
        server.start()
        logger.info("starting the SGLang server; its log: %s", server.log_file)
        if own_key_file is not None:
            _write_key(own_key_file, spec.api_key)
        server.wait_until_healthy(START_SECONDS)
        _print_how_to_use(server, str(own_key_file or given[1:]))
        while server.is_running:
            time.sleep(1)
        raise EngineError(f"{server.url} ended. The end of its log:\n{server.log_tail()}")
    finally:
        server.stop()
        if own_key_file is not None:
            own_key_file.unlink(missing_ok=True)


def _write_key(file: Path, api_key: str) -> None:
    with open(file, "w", opener=open_private) as key:
        key.write(f"{api_key}\n")


def _print_how_to_use(server: EngineServer, key_file: str) -> None:
    print(f"contract {server.spec.contract.fingerprint}; log {server.log_file}")
    if server.spec.serves_text:
        print(f"OpenAI clients: base_url {server.url}/v1, and what is in {key_file} as api_key")
    print(f"--rollout-server-url {server.url} --rollout-api-key @{key_file}", flush=True)
