"""`onpolicy serve`."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from onpolicy.cli.parse import parse
from onpolicy.config import sglang_flags, tensor_parallel
from onpolicy.config.ranges import require_ranges
from onpolicy.config.secrets import reveal
from onpolicy.config.tools import ServeConfig
from onpolicy.config.validate import (
    require_key_for_host,
    require_mode_for_operators,
    require_secrets,
)
from onpolicy.errors import EngineError
from onpolicy.outputs.console import configure_logging
from onpolicy.outputs.places import require_directory

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Start the server, print how to use it, and keep it until interrupted."""
    config = parse(ServeConfig, argv, "onpolicy serve")
    require_ranges(config)
    sglang_flags.validate(config.sglang_args, aligned=config.true_on_policy_mode)
    require_key_for_host(config.rollout_host, config.rollout_api_key)
    require_secrets(config.rollout_api_key, config.sglang_args)
    require_mode_for_operators(config.operators, aligned=config.true_on_policy_mode)
    tp_size = sglang_flags.tensor_parallel_size(config.sglang_args)
    blocks = tensor_parallel.count_blocks(
        config.row_parallel_blocks,
        {"--sglang-tp-size": tp_size},
        aligned=config.true_on_policy_mode,
    )
    require_directory("--run-dir", config.run_dir)

    configure_logging()
    logger.info("loading PyTorch and transformers")

    from onpolicy.models.hf_config import load_config
    from onpolicy.models.tokenizer import load_tokenizer
    from onpolicy.models.weight_files import require_fit
    from onpolicy.rollout.engine_args import EngineSpec
    from onpolicy.rollout.flag_check import FlagCheck
    from onpolicy.rollout.reach import require_place
    from onpolicy.rollout.server import EngineServer, open_private
    from onpolicy.run.start import cache_tokens, make_contract, share_of_cores

    hf_config = load_config(config.hf_checkpoint, config.trust_remote_code)
    serves_text = "--skip-tokenizer-init" not in config.sglang_args
    if serves_text:
        load_tokenizer(config.hf_checkpoint, config.trust_remote_code)
    contract = make_contract(
        config.hf_checkpoint,
        hf_config,
        dtype=config.dtype,
        aligned=config.true_on_policy_mode,
        tp_size=tp_size,
        row_parallel_blocks=blocks,
        operators=config.operators,
        trust_remote_code=config.trust_remote_code,
    )
    spec = EngineSpec(
        hf_checkpoint=config.hf_checkpoint,
        contract=contract,
        host=config.rollout_host,
        api_key=reveal("--rollout-api-key", config.rollout_api_key) or secrets.token_hex(24),
        seed=config.seed,
        num_threads=config.cpu_threads or share_of_cores(tp_size),
        max_concurrency=256,
        cache_tokens=cache_tokens(hf_config, contract),
        serves_text=serves_text,
        trust_remote_code=config.trust_remote_code,
        sglang_args=config.sglang_args,
    )
    directory = Path(config.run_dir).absolute()
    require_place(config.rollout_host, config.rollout_base_port)
    with FlagCheck(spec) as flags:
        require_fit(config.hf_checkpoint, hf_config, config.trust_remote_code)
        flags.require_passed()
    server = EngineServer(spec, config.rollout_base_port, directory / "engine.log")
    given = config.rollout_api_key
    key_file = None if given.startswith("@") else directory / "api_key"
    try:
        server.start()
        logger.info("starting the SGLang server; its log: %s", server.log_file)
        if key_file is not None:
            with open(key_file, "w", opener=open_private) as file:
                file.write(f"{spec.api_key}\n")
        server.wait_until_healthy(timeout=3600)
        print(f"contract {contract.fingerprint}; log {server.log_file}")
        if serves_text:
            holder = key_file or given[1:]
            print(f"OpenAI clients: base_url {server.url}/v1, and what is in {holder} as api_key")
        api_key = f"@{key_file}" if key_file else given
        print(f"--rollout-server-url {server.url} --rollout-api-key {api_key}", flush=True)
        while server.is_running:
            time.sleep(1)
        raise EngineError(f"{server.url} ended. The end of its log:\n{server.log_tail()}")
    finally:
        server.stop()
        if key_file is not None:
            key_file.unlink(missing_ok=True)
