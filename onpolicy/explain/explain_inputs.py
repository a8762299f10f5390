"""Inputs of `onpolicy explain`: random prompts as in `verify`, or the case that a run left."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.config.flags import with_flags
from onpolicy.config.groups import LoraConfig
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.config.tool_flags import ExplainConfig
from onpolicy.contract import AdapterShape, NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.expert_layers import expert_names
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.peft_adapter import CONFIG, read_peft_adapter
from onpolicy.outputs.directory import versions
from onpolicy.run.cases import read_case
from onpolicy.run.commands.random_prompts import make_prompts
from onpolicy.run.commands.verification import (
    longest_prompt,
    make_train_config,
    requests_of,
)
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.cluster_engines import MakeEngines, require_shared_by_servers
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import make_rollout_group
from onpolicy.run.saving.checkpoint import STATE, checkpoints
from onpolicy.types import Request

if TYPE_CHECKING:  # it imports Ray, which a session prepares
    from onpolicy.rollout.sglang import SglangGroup

logger = logging.getLogger(__name__)

Result = dict[str, Any]

TAPS = "sglang_patches.taps:Taps"
"""The server extension that records passes in a directory."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The configuration of both engines, and the requests to them."""

    hf_config: PretrainedConfig
    train_config: TrainConfig
    requests: list[Request]
    directory: Path

    @staticmethod
    def of(config: ExplainConfig) -> Inputs:
        """Return the inputs. Raises ConfigError for an invalid case, or prompts too long for the
        context."""
        hf_config = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
        longest = longest_prompt(config, hf_config)
        prompts = make_prompts(config, hf_config.vocab_size, longest)
        case = [read_case(Path(config.case)).request] if config.case else None
        requests = case or requests_of(prompts, config, 0)
        directory = Path(config.run_dir).absolute()
        return Inputs(hf_config, make_train_config(config, longest), requests, directory)

    def contract(self, *, aligned: bool) -> NumericsContract:
        """Return the contract of both engines. Raises ConfigError for adapters that cannot be
        recorded."""
        contract = contract_for(self.train_config, self.hf_config, aligned=aligned)
        if contract.adapter is not None:
            self._require_recorded(contract.adapter)
        return contract

    def _require_recorded(self, adapter: AdapterShape) -> None:
        """Raise ConfigError for adapters that cannot be recorded."""
        model = empty_causal_lm(self.hf_config, self.train_config.model.trust_remote_code)
        config, megatron = self.train_config, self.train_config.megatron
        degrees = {
            "--sglang-tp-size": tensor_parallel_size(config.sglang_args),
            "--megatron-tp": megatron.megatron_tp,
            "--megatron-ep": megatron.megatron_ep,
        }
        shared = next((f"{flag}={n}" for flag, n in degrees.items() if n > 1), "")
        if shared and any(leaf in adapter.targets for leaf in expert_names(model)):
            raise ConfigError(
                f"--lora-target-modules={config.lora.lora_target_modules}: adapters of experts are not "
                f"recorded with {shared}. Name other linears, or ask `onpolicy verify`, which takes it, "
                "whether a token differs."
            )

    @contextmanager
    def engines(
        self, contract: NumericsContract, taps: Path, make_engines: MakeEngines
    ) -> Iterator[EnginePair]:
        """Start both engines, with servers that record into a directory, and stop them afterwards."""
        engines = make_engines(
            self.train_config,
            self.hf_config,
            contract,
            self.directory,
            longest_sequence=max(
                len(r.prompt_ids) + r.params.max_new_tokens for r in self.requests
            ),
            make_rollout=partial(make_rollout_group, extensions={TAPS: str(taps)}),
        )
        rollout: SglangGroup = engines.rollout  # type: ignore[assignment]
        flag = f"--run-dir={self.train_config.output.run_dir}"
        require_shared_by_servers(flag, self.directory, rollout.servers)
        try:
            engines.start()
            yield engines
        finally:
            engines.stop()


def made_by(contract: NumericsContract) -> Result:
    """Return the versions and the contract that produced a result."""
    own = {**json.loads(contract.to_json()), "fingerprint": contract.fingerprint}
    return {"versions": versions(), "contract": own}


def with_case(config: ExplainConfig) -> ExplainConfig:
    """Return the configuration with the weights of --load and the case's sampling settings.

    Raises ConfigError if a file is invalid, or there is no checkpoint.
    """
    if config.load:
        config = _with_weights(config, _exported(Path(config.load), config))
    if not config.case:
        return config
    case = read_case(Path(config.case))
    contract = case.contract
    if contract.adapter and not config.lora.lora_rank:
        raise ConfigError(
            f"--case={config.case}: was sampled with adapters. Give them by --load or --lora-adapter, "
            "or, of a run's first rollout, its --lora-* flags and --seed."
        )
    blocks = contract.row_parallel_blocks if contract.is_aligned else 0
    asked = with_flags(
        config,
        {
            "row_parallel_blocks": blocks,
            "rollout_weight_format": contract.weight_format,
            "rollout_activation_format": contract.activation_format,
            "temperature": case.params.temperature,
            "max_prompt_len": max(8, case.prompt_len),
            "max_new_tokens": case.params.max_new_tokens,
            "dtype": contract.dtype,
        },
    )
    return replace(asked, true_on_policy_mode=contract.is_aligned)


def compare_weights(config: ExplainConfig, digest: str) -> None:
    """Log a warning if the engines do not hold the weights that the case was sampled with."""
    case = read_case(Path(config.case))
    if digest != case.weight_digest:
        logger.warning(
            "%s: was sampled with other weights (%s, version %s) than those of %s (%s), so its "
            "mismatch may not come again. Give the checkpoint of rollout %d, with --load or "
            "--hf-checkpoint.",
            config.case, case.weight_digest, case.trajectory.weight_version,
            config.model.hf_checkpoint, digest, case.step,
        )  # fmt: skip


def _with_weights(config: ExplainConfig, directory: Path) -> ExplainConfig:
    """Return the configuration with an exported checkpoint as --hf-checkpoint, or with its adapter."""
    if (directory / CONFIG).exists():
        flags = read_peft_adapter(str(directory), "--load").flags
        return replace(config, lora=LoraConfig(**flags, lora_adapter=str(directory)))
    return replace(config, model=replace(config.model, hf_checkpoint=str(directory)))


def _exported(directory: Path, config: ExplainConfig) -> Path:
    """Return the directory of a checkpoint's exported weights, which are the pushed ones.

    It is the checkpoint that the case was sampled with, if it was saved; else the latest.
    """
    if not (directory / STATE).exists():
        found = checkpoints(directory) if directory.is_dir() else {}
        if not found:
            raise ConfigError(
                f"--load={directory}: holds no checkpoint. Give the --save directory of the run, or one "
                "checkpoint in it."
            )
        latest = max(found)
        step = read_case(Path(config.case)).step if config.case else latest
        if step not in found:
            logger.warning(
                "--load=%s: has no checkpoint of rollout %d; taking the latest, %d, so the case may not "
                "come again", config.load, step, latest,
            )  # fmt: skip
        directory = found.get(step, found[latest])
    logger.info("weights of %s", directory)
    return directory / "hf"
