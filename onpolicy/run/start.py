"""Puts a run together: from a configuration to the groups and files that the loop works with."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from onpolicy.config import TrainConfig
from onpolicy.config.eval_sets import eval_sets
from onpolicy.config.secrets import reveal
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import has_experts, load_config, require_alignable
from onpolicy.models.policy import operator_shapes
from onpolicy.models.tensor_parallel import require_shardable
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.ops.capability import choose_backend
from onpolicy.ops.environment import require_exact
from onpolicy.ops.machine import Machine
from onpolicy.outputs.directory import check_sinks
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.base import RolloutGroup
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.rollout.flag_check import FlagCheck
from onpolicy.rollout.prompts import PromptSource, load_prompts
from onpolicy.rollout.reach import require_addresses
from onpolicy.rollout.sglang import SglangGroup
from onpolicy.run.input_checks import require_full_batch, require_tokens, require_weights
from onpolicy.run.ladder import Ladder
from onpolicy.system.reading import read_json_object
from onpolicy.train import distributed
from onpolicy.train.correction import Corrections
from onpolicy.train.correction_flags import loss_settings
from onpolicy.train.megatron import make as megatron
from onpolicy.types import Prompt

logger = logging.getLogger(__name__)

CACHE_BYTES = 2 << 30
"""Memory for the key/value cache of one CPU engine, unless --sglang-max-total-tokens is given."""

MARGIN = 2
"""Tokens that SGLang keeps free at the end of the context."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that is read, and so can be wrong, before anything is started."""

    hf_config: PretrainedConfig

    ladder: Ladder
    """What both engines are started from, and started again when the governor moves."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource

    eval_sets: dict[str, list[Prompt]]
    """By their names; the name of a single one may be empty."""

    stop_token_ids: tuple[int, ...]


def read_inputs(config: TrainConfig, scorer: Scorer) -> Inputs:
    """Read and check the checkpoint and all data. Raises ConfigError for whatever is wrong."""
    check_sinks(config.output)
    path, trust = config.model.hf_checkpoint, config.model.trust_remote_code
    logger.info("reading %s and the prompts", path)
    hf_config = load_config(path, trust)
    require_addresses(config.engine, config.engine.rollout_api_key)
    lengths = {
        "--rollout-max-response-len": config.rollout.rollout_max_response_len,
        "--eval-max-response-len": config.eval.eval_max_response_len or 0,
    }
    flag, longest = max(lengths.items(), key=lambda item: item[1])
    context_len = hf_config.max_position_embeddings
    if longest + MARGIN >= context_len:
        raise ConfigError(
            f"{flag}={longest}: with {MARGIN} tokens that SGLang keeps free it "
            f"does not fit the model's context of {context_len}. Lower it."
        )
    tokenizer = load_tokenizer(path, trust)

    def read(file: str, flag: str) -> list[Prompt]:
        room = context_len - MARGIN - longest
        prompts = load_prompts(file, config.data, tokenizer, room, hf_config.vocab_size, flag)
        scorer.check_labels(prompts, f"{flag}={file}")
        return prompts

    ladder = make_ladder(config, hf_config)
    with FlagCheck(make_engine_spec(config, hf_config, ladder.contract)) as flags:
        prompts = read(config.data.prompt_data, "--prompt-data")
        require_full_batch(config, len(prompts))
        scorer.try_out(prompts[0])
        inputs = Inputs(
            hf_config=hf_config,
            ladder=ladder,
            tokenizer=tokenizer,
            prompts=PromptSource(prompts, config.seed, config.data.shuffle),
            eval_sets={
                name: read(file, "--eval-prompt-data")
                for name, file in eval_sets(config.eval.eval_prompt_data).items()
            },
            stop_token_ids=stop_token_ids(path, hf_config, config.rollout.rollout_stop_token_ids),
        )
        require_weights(config, hf_config)
        flags.require_passed()
    return inputs


def make_ladder(config: TrainConfig, hf_config: PretrainedConfig) -> Ladder:
    """Raises ConfigError if the run can come to a contract or a correction that there is not."""

    if config.fallback.use_rollout_routing_replay and not has_experts(hf_config):
        raise ConfigError(
            f"--use-rollout-routing-replay: architecture={(hf_config.architectures or ['none'])[0]} "
            "has no experts to choose. Leave it out."
        )
    try:
        loss_settings(config)
        Corrections(config)
        aligned = _contract(config, hf_config, aligned=True) if config.may_align else None
        return Ladder(config, _contract(config, hf_config, aligned=False), aligned)
    except ConfigError:
        raise
    except ValueError as error:  # of fallback_correction, which knows no flags
        raise ConfigError(f"corrections: {error}") from error


def check_layout(config: TrainConfig) -> None:
    """Raise ConfigError if the model cannot be laid out over torchrun's ranks; starts nothing."""
    if config.trainer.train_backend == "megatron":
        hf_config = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
        megatron.check(config, hf_config, _contract(config, hf_config, aligned=False))


def _contract(
    config: TrainConfig, hf_config: PretrainedConfig, *, aligned: bool
) -> NumericsContract:
    model = config.model
    return make_contract(
        model.hf_checkpoint,
        hf_config,
        dtype=model.dtype,
        aligned=aligned,
        tp_size=tensor_parallel_size(config.sglang_args),
        row_parallel_blocks=config.count_row_parallel_blocks(),
        operators=config.parity.operators,
        trust_remote_code=model.trust_remote_code,
    )


def make_contract(
    path: str,
    hf_config: PretrainedConfig,
    *,
    dtype: str,
    aligned: bool,
    tp_size: int = 1,
    row_parallel_blocks: int = 1,
    operators: str = "auto",
    trust_remote_code: bool = False,
) -> NumericsContract:
    """The contract that both engines are started from; `tp_size` is the rollout's degree."""
    if aligned:
        require_alignable(hf_config, hf_config.max_position_embeddings, trust_remote_code)
        require_exact(os.environ)
    shapes = operator_shapes(hf_config, trust_remote_code, row_parallel_blocks)
    backend = "stock"
    if aligned:
        require_shardable(hf_config, shapes, tp_size=tp_size, blocks=row_parallel_blocks)
        backend = choose_backend(operators, dtype, shapes, row_parallel_blocks, Machine.here())
        logger.info("aligned operators: %s, %s", backend, dtype)
    return NumericsContract(
        backend=backend,
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=dtype,
        shapes=shapes,
        row_parallel_blocks=row_parallel_blocks,
    )


def stop_token_ids(
    path: str, hf_config: PretrainedConfig, extra: Sequence[int] = ()
) -> tuple[int, ...]:
    """The tokens that end a response: the checkpoint's end-of-sequence tokens and `extra`.

    Raises ConfigError for a token that the model does not have.
    """
    ids = set(require_tokens("--rollout-stop-token-ids", extra, hf_config))
    name = f"--hf-checkpoint={path}"
    ids |= require_tokens(f"{name}: config.json: eos_token_id", hf_config.eos_token_id, hf_config)
    file = Path(path) / "generation_config.json"
    if file.is_file():
        eos = read_json_object(file, f"{name}: {file.name}").get("eos_token_id")
        ids |= require_tokens(f"{name}: {file.name}: eos_token_id", eos, hf_config)
    return tuple(sorted(ids))


def make_rollout_group(
    config: TrainConfig, hf_config: PretrainedConfig, contract: NumericsContract, logs: Path
) -> RolloutGroup:
    """The rollout's servers, not started yet."""
    return SglangGroup(config.engine, make_engine_spec(config, hf_config, contract), logs)


def make_engine_spec(
    config: TrainConfig, hf_config: PretrainedConfig, contract: NumericsContract
) -> EngineSpec:
    """What each of the rollout's servers is started with."""
    engine = config.engine
    num_processes = engine.rollout_num_engines * tensor_parallel_size(config.sglang_args)
    if contract.device == "cuda":
        _require_gpus(config)
    return EngineSpec(
        hf_checkpoint=config.model.hf_checkpoint,
        contract=contract,
        host=engine.rollout_host,
        api_key=reveal("--rollout-api-key", engine.rollout_api_key) or secrets.token_hex(24),
        seed=config.seed,
        num_threads=engine.cpu_threads or share_of_cores(num_processes),
        max_concurrency=engine.rollout_max_concurrency,
        cache_tokens=cache_tokens(hf_config, contract),
        first_gpu=distributed.local_world_size(),
        weight_format="" if contract.is_aligned else engine.rollout_weight_format,
        returns_routed_experts=replays_routing(config, contract),
        trust_remote_code=config.model.trust_remote_code,
        sglang_args=config.sglang_args,
    )


def replays_routing(config: TrainConfig, contract: NumericsContract) -> bool:
    """Whether the trainer is to take the experts that the rollout took; aligned engines agree."""
    return config.fallback.use_rollout_routing_replay and not contract.is_aligned


def _require_gpus(config: TrainConfig) -> None:
    """The trainer's ranks take the first GPUs of this host, the servers those after them."""
    ranks, servers = distributed.local_world_size(), config.engine.rollout_num_engines
    gpus_per_server = tensor_parallel_size(config.sglang_args)
    needed, found = ranks + servers * gpus_per_server, torch.cuda.device_count()
    if not config.engine.rollout_server_url and needed > found:
        raise ConfigError(
            f"--rollout-num-engines={servers}: {ranks} trainer ranks + {servers} servers x "
            f"--sglang-tp-size {gpus_per_server} = {needed} GPUs, and this host has {found}. Start "
            "fewer ranks (torchrun --nproc-per-node) or fewer servers."
        )


def share_of_cores(processes: int) -> int:
    """Threads for each of some processes on this host."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def cache_tokens(hf_config: PretrainedConfig, contract: NumericsContract) -> int:
    """Tokens whose keys and values fit CACHE_BYTES."""
    itemsize = torch.empty(0, dtype=getattr(torch, contract.dtype)).element_size()
    shapes = contract.shapes
    per_token = 2 * hf_config.num_hidden_layers * shapes.kv_heads * shapes.head_dim * itemsize
    return max(hf_config.max_position_embeddings, min(1 << 17, CACHE_BYTES // per_token))
