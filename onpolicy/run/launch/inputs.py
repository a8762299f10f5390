"""The inputs of a run, checked before anything is started."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from onpolicy.agents.environments.launch import environment_rows
from onpolicy.config import TrainConfig
from onpolicy.config.groups import DataConfig
from onpolicy.config.groups.agents import has_agent, is_of_verifiers
from onpolicy.config.secrets import control_key, reveal
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.outputs.directory import check_sinks
from onpolicy.outputs.rollout_journal import RolloutJournal
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.engine_args import CONTEXT_MARGIN
from onpolicy.rollout.flag_check import FlagCheck
from onpolicy.rollout.prompt_order import PromptSource, joined
from onpolicy.rollout.prompts import make_prompts
from onpolicy.rollout.server import require_addresses
from onpolicy.run.ladder import Ladder
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import rollout_spec
from onpolicy.run.launch.input_checks import (
    check_layout,
    require_context,
    require_experts,
    require_full_batch,
    require_weights,
)
from onpolicy.run.launch.memory_checks import require_run_fits
from onpolicy.run.launch.prompt_inputs import EvalPrompts, PromptReader
from onpolicy.run.launch.push_checks import require_transport
from onpolicy.run.launch.replay_checks import read_replayed
from onpolicy.run.launch.rollouters import make_rollouter
from onpolicy.run.launch.stop_tokens import stop_tokens_of
from onpolicy.run.launch.teacher_checks import require_teachers
from onpolicy.run.saving import digest_sets
from onpolicy.token_weights import require_terms
from onpolicy.train.correction import Corrections
from onpolicy.train.loss import LossSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that a run reads, after all checks."""

    hf_config: PretrainedConfig

    ladder: Ladder
    """The contract and corrections of each rung, for the start and for moves of the governor."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource

    eval_sets: dict[str, EvalPrompts]
    """The evaluation sets by name; the name of a single set may be empty."""

    stop_token_ids: tuple[int, ...]

    replayed: RolloutJournal | None = None
    """The journal that --replay repeats."""

    @property
    def evaluations(self) -> dict[str, str]:
        """Return the result of `digest_sets` for the evaluation sets."""
        sets = self.eval_sets.items()
        return digest_sets({name: (each.settings.measure, each.prompts) for name, each in sets})

    def max_context_len(self, config: TrainConfig) -> int:
        """Return the limit on a sequence's tokens, given and sampled ones together."""
        room: int = self.hf_config.max_position_embeddings - CONTEXT_MARGIN
        return config.agent.rollout_max_context_len or room

    def longest_sequence(self, config: TrainConfig) -> int:
        """Return the tokens of the longest sequence that the run may request from an engine."""
        if has_agent(config.agent):
            return self.max_context_len(config)
        sampled = config.rollout.rollout_max_response_len
        lengths = [len(prompt.prompt_ids) + sampled for prompt in self.prompts.prompts]
        for each in self.eval_sets.values():
            evaluated = each.settings.max_response_len
            lengths += [len(prompt.prompt_ids) + evaluated for prompt in each.prompts]
        return max(lengths)


def read_inputs(config: TrainConfig, scorer: Scorer) -> Inputs:
    """Read and check the checkpoint and all data. Raises ConfigError for any error in them."""
    check_layout(config)
    make_rollouter(config)
    check_sinks(config.output)
    path, trust = config.model.hf_checkpoint, config.model.trust_remote_code
    logger.info("reading %s and the prompts", path)
    hf_config = load_config(path, trust)
    key = reveal("--rollout-api-key", config.engine.rollout_api_key)
    require_addresses(config.engine, key, control_key(config.sglang_args, key))
    longest_prompt = require_context(config, hf_config)
    tokenizer = load_tokenizer(path, trust)
    require_teachers(config, tokenizer)

    reader = PromptReader(
        config=config,
        scorer=scorer,
        tokenizer=tokenizer,
        vocab_size=hf_config.vocab_size,
        longest=longest_prompt,
    )
    ladder = make_ladder(config, hf_config)
    with FlagCheck(rollout_spec(config, hf_config, ladder.contract)) as flags:
        if is_of_verifiers(config.agent):
            rows, data = environment_rows(config.agent), DataConfig(apply_chat_template=True)
            name = f"--environment={config.agent.environment}"
            vocab_size = hf_config.vocab_size
            sources = [make_prompts(rows, data, tokenizer, longest_prompt, vocab_size, name)]
        else:
            sources = [reader.read(source, "--prompt-data") for source in config.data.prompt_data]
        prompts, parts = joined(sources, config.data.prompt_data_weights)
        require_full_batch(config, len(prompts))
        require_terms(config, scorer.try_out(prompts[0]), config.reward.flag)
        inputs = Inputs(
            hf_config=hf_config,
            ladder=ladder,
            tokenizer=tokenizer,
            prompts=PromptSource(prompts, config.seed, config.data.shuffle, parts),
            eval_sets={name: reader.read_set(each) for name, each in config.eval_sets.items()},
            stop_token_ids=stop_tokens_of(config, hf_config, tokenizer),
            replayed=read_replayed(config, prompts),
        )
        require_weights(config, hf_config)
        spec = rollout_spec(config, hf_config, ladder.contract, inputs.longest_sequence(config))
        size = ModelSize.of(hf_config, trust, ladder.contract.adapter)
        require_run_fits(config, hf_config, spec, size)
        require_transport(config, ladder.contract)
        flags.require_passed()
    return inputs


def make_ladder(config: TrainConfig, hf_config: PretrainedConfig) -> Ladder:
    """Return the contracts that the run may move between, with their corrections.

    Raises ConfigError for a contract that cannot be kept, and for invalid corrections.
    """
    require_experts(config, hf_config)
    try:
        LossSettings.of(config)
        Corrections(config)
        aligned = contract_for(config, hf_config, aligned=True) if config.plan.may_align else None
        return Ladder(config, contract_for(config, hf_config, aligned=False), aligned)
    except ConfigError:
        raise
    except ValueError as error:  # of fallback_correction, which knows no flags
        raise ConfigError(f"corrections: {error}") from error
