"""The inputs of a run, checked before anything is started.

Among them are the prompts of the run and of its evaluation sets (`PromptReader`), and the rollouter
that the run's flags select (`make_rollouter`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from onpolicy.agents.agent_workers import (
    AgentFunction,
    WorkerRollouter,
    num_programs,
    num_workers,
)
from onpolicy.agents.environments.environment_choice import environment_function, environment_rows
from onpolicy.agents.function import FLAG, FunctionRollouter, load_agent
from onpolicy.agents.gateway import gateway_start
from onpolicy.agents.gateway.gateway_server import Gateway
from onpolicy.agents.gateway.session_rollouter import AgentRollouter, acts_by, in_thread
from onpolicy.agents.program import command_of, program_function
from onpolicy.config import TrainConfig
from onpolicy.config.groups import DataConfig, EvalSet, RolloutConfig
from onpolicy.config.groups.agent_flags import (
    AgentConfig,
    has_agent,
    has_gateway,
    is_of_verifiers,
    template_options,
)
from onpolicy.config.groups.reward_flags import RULES, is_function, weights_of
from onpolicy.config.secrets import control_key, reveal
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.images.placing import ImagePlacer
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.outputs.directory import check_sinks
from onpolicy.outputs.recorded_order import RolloutJournal
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.engine_args import CONTEXT_MARGIN, FlagCheck
from onpolicy.rollout.generated_prompts import is_procedural
from onpolicy.rollout.prompt_order import PromptSource, joined
from onpolicy.rollout.prompts import Read, load_prompts, make_prompts
from onpolicy.rollout.rollouter import Rollouter, SingleTurn
from onpolicy.rollout.server import require_addresses
from onpolicy.run.ladder import Ladder
from onpolicy.run.launch import input_checks
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import rollout_spec
from onpolicy.run.launch.memory import require_run_fits
from onpolicy.run.launch.stop_tokens import stop_tokens_of
from onpolicy.run.launch.teacher_checks import require_teachers
from onpolicy.run.saving import digest_sets
from onpolicy.system.files import read_text
from onpolicy.token_weights import require_terms
from onpolicy.training.loss import LossSettings
from onpolicy.training.rollout_correction import Corrections
from onpolicy.types import Prompt, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that a run reads, after all checks."""

    hf_config: PretrainedConfig

    contract: NumericsContract
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource

    eval_sets: dict[str, EvalPrompts]
    """The evaluation sets by name; the name of a single set may be empty."""

    stop_token_ids: tuple[int, ...]

    placer: ImagePlacer | None = None
    """The places of images; None: without --images."""

    replayed: RolloutJournal | None = None
    ladder: Ladder | None = None
    """The contract and corrections of each rung; None without a governor."""

    @property
    def evaluations(self) -> dict[str, str]:
        """Return the result of `digest_sets` for the evaluation sets."""
        sets = self.eval_sets.items()
        return digest_sets({name: (each.settings.measure, each.prompts) for name, each in sets})

    def max_context_len(self, config: TrainConfig) -> int:
        """Return the limit on a sequence's tokens, given and sampled ones together."""
        room: int = self.hf_config.max_position_embeddings - CONTEXT_MARGIN
        return config.agent.rollout_max_context_len or room

    def params(self, rollout: RolloutConfig, max_new_tokens: int) -> SamplingParams:
        """Return the sampling parameters of a rollout's responses, of up to `max_new_tokens` tokens."""
        return SamplingParams(
            temperature=rollout.rollout_temperature,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self.stop_token_ids,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            min_p=rollout.rollout_min_p,
        )

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
    """Read and check the checkpoint and all data; a run of no rollouts has evaluation sets alone, and
    no trainer. Raises ConfigError for any error in them."""
    input_checks.check_layout(config)
    make_rollouter(config)
    check_sinks(config.output)
    path, trust = config.model.hf_checkpoint, config.model.trust_remote_code
    logger.info("reading %s and the prompts", path)
    hf_config = load_config(path, trust)
    key = reveal("--rollout-api-key", config.engine.rollout_api_key)
    require_addresses(config.engine, key, control_key(config.sglang_args, key))
    longest_prompt = input_checks.require_context(config, hf_config)
    tokenizer = load_tokenizer(path, trust)
    require_teachers(config, tokenizer)
    placer = ImagePlacer.of(config.model.tower_of, tokenizer)

    reader = PromptReader(
        config=config,
        scorer=scorer,
        tokenizer=tokenizer,
        vocab_size=hf_config.vocab_size,
        longest=longest_prompt,
        placer=placer,
    )
    contract, ladder = make_contract(config, hf_config)
    with FlagCheck(rollout_spec(config, hf_config, contract)) as flags:
        sources = reader.read_sources() if config.takes_steps else []
        prompts, parts = joined(sources, config.data.prompt_data_weights)
        eval_sets = {name: reader.read_set(each) for name, each in config.eval_sets.items()}
        if config.takes_steps:
            input_checks.require_full_batch(config, len(prompts))
            require_terms(config, scorer.try_out(prompts[0]), config.reward.flag)
        else:  # sets with rewards of their own were tried as they were read
            firsts = (each.prompts[0] for each in eval_sets.values())
            for first in [x for x in firsts if not (x.rule or x.rewards)][:1]:
                scorer.try_out(first)
        inputs = Inputs(
            hf_config=hf_config,
            contract=contract,
            ladder=ladder,
            tokenizer=tokenizer,
            prompts=PromptSource(prompts, config.seed, config.data.shuffle, parts),
            eval_sets=eval_sets,
            stop_token_ids=stop_tokens_of(config, hf_config, tokenizer),
            placer=placer,
            replayed=input_checks.read_replayed(config, prompts),
        )
        input_checks.require_weights(config, hf_config)
        spec = rollout_spec(config, hf_config, contract, inputs.longest_sequence(config))
        size = ModelSize.of(hf_config, trust, contract.adapter, config.model.tower_of)
        ranks = config.cluster.num_ranks * config.takes_steps
        require_run_fits(config, hf_config, spec, size, ranks)
        input_checks.require_transport(config, contract)
        flags.require_passed()
    return inputs


def make_contract(
    config: TrainConfig, hf_config: PretrainedConfig
) -> tuple[NumericsContract, Ladder | None]:
    """Return the contract at the start, and what a governor may move between. Raises ConfigError
    for a contract that cannot be kept, and for invalid corrections."""
    input_checks.require_experts(config, hf_config)
    if config.num_likeliest > hf_config.vocab_size:
        raise ConfigError(
            f"--opd-top-k={config.num_likeliest}: the model knows {hf_config.vocab_size} tokens, over "
            "which what reads it is exact. Give no more."
        )
    try:
        LossSettings.of(config)
        Corrections(config)
        if not config.plan.is_governed:
            return contract_for(config, hf_config, aligned=config.plan.starts_aligned), None
        aligned = contract_for(config, hf_config, aligned=True) if config.plan.may_align else None
        ladder = Ladder(config, contract_for(config, hf_config, aligned=False), aligned)
        return ladder.contract, ladder
    except ConfigError:
        raise
    except ValueError as error:  # of fallback_correction, which knows no flags
        raise ConfigError(f"corrections: {error}") from error


class EvalPrompts(NamedTuple):
    """An evaluation set with its prompts."""

    settings: EvalSet
    prompts: list[Prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """A reader of prompts. Raises ConfigError for one that could not be sampled or scored."""

    config: TrainConfig
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int

    longest: int
    """The most tokens of a prompt."""

    placer: ImagePlacer | None = None

    def read_sources(self) -> list[list[Prompt]]:
        """Return the training prompts of each --prompt-data, or of an environment of verifiers."""
        agent = self.config.agent
        if not is_of_verifiers(agent):
            return [self.read(source, "--prompt-data") for source in self.config.data.prompt_data]
        rows, data = environment_rows(agent), DataConfig(apply_chat_template=True)
        given = self.longest, self.vocab_size, f"--environment={agent.environment}"
        return [make_prompts(rows, data, self.tokenizer, *given, placer=self.placer)]

    def read(
        self, file: str, flag: str, data: DataConfig | None = None, each: EvalSet | None = None
    ) -> list[Prompt]:
        """Return the prompts of a file. each: its evaluation set, which may name its own rewards."""
        given = self.longest, self.vocab_size, flag, self.config.seed
        sources = each.sources if each is not None and each.sources else self.scorer.sources
        prompts = load_prompts(
            file,
            data or self.config.data,
            self.tokenizer,
            *given,
            read=self._read_of_a_row(sources),
            placer=self.placer,
        )
        if each is not None and each.sources:
            rewards = weights_of(each.rewards)
            prompts = [replace(x, rule=each.rm_type, rewards=rewards) for x in prompts]
        self.scorer.check_labels(prompts, f"{flag}={file}")
        return prompts

    def _read_of_a_row(self, sources: Collection[str]) -> Read:
        """Return the fields of a row that these rewards, and the run's agent, read beside its prompt."""
        label = any(name in RULES for name in sources)
        if "judge" in sources:
            file = self.config.reward.judge_prompt
            label |= "{label}" in read_text(Path(file), f"--judge-prompt={file}")
        fields = "remote_rm" in sources or any(map(is_function, sources))
        run = self.config
        return Read(
            label=label,
            fields=fields or has_agent(run.agent) or bool(run.distillation.teacher_key),
        )

    def read_set(self, each: EvalSet) -> EvalPrompts:
        """Return an evaluation set with its prompts."""
        # Problems are seeded by a flag's name, so that they do not depend on where the set is given.
        flag = "--eval-prompt-data" if is_procedural(each.path) else each.flag
        data = replace(self.config.data, input_key=each.input_key, label_key=each.label_key)
        prompts = self.read(each.path, flag, data, each)
        if each.sources:
            self.scorer.try_out(prompts[0])
        return EvalPrompts(settings=each, prompts=prompts)


def make_rollouter(config: TrainConfig) -> Rollouter:
    """Return the rollouter of a run. Raises ConfigError for a function that cannot be used."""
    if path := config.agent.custom_generate_function_path:
        return _calling(AgentFunction(path=path, flag=FLAG), config.agent)
    if path := config.agent.custom_agent_function_path:
        gateway_start.require_parsers(config.agent)
        return AgentRollouter(partial(_gateway, config), in_thread(gateway_start.load_agent(path)))
    if text := config.agent.agent_command:
        repeats = config.agent.agent_command_repeats
        return _with_sessions(config, program_function(command_of(text), repeats=repeats))
    if config.agent.environment:
        own = environment_function(config.agent)
        if has_gateway(config.agent):
            return _with_sessions(config, own)
        gateway_start.require_parsers(config.agent)
        return _calling(own, config.agent)
    return SingleTurn()


def _with_sessions(config: TrainConfig, own: AgentFunction) -> Rollouter:
    """Return a rollouter that calls a function in workers, with a gateway session for each episode."""
    gateway_start.require_parsers(config.agent)
    acting = _calling(own, config.agent)
    return acts_by(acting, partial(_gateway, config), num_programs(config.agent))


def _calling(own: AgentFunction, config: AgentConfig) -> Rollouter:
    """Return a rollouter that calls a function in workers, or, without any, in the run's process."""
    function = load_agent(own.path, own.flag, own.arguments)
    if workers := num_workers(config):
        return WorkerRollouter(own, workers, config.agent_hang_limit)
    return FunctionRollouter(function)


def _gateway(config: TrainConfig) -> Gateway:
    path, trust = config.model.hf_checkpoint, config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust)
    stops = stop_tokens_of(config, load_config(path, trust), tokenizer)
    options = template_options(config.data.chat_template_kwargs)
    placer = ImagePlacer.of(config.model.tower_of, tokenizer)
    return gateway_start.make_gateway(config.agent, tokenizer, stops, options, placer)
