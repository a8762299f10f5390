"""The inputs of `onpolicy eval`, checked before anything is started."""

from __future__ import annotations

import logging

from onpolicy.config import TrainConfig
from onpolicy.config.secrets import control_key, reveal
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.models.weight_files import require_fit
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.rollout.flag_check import FlagCheck
from onpolicy.rollout.prompt_order import PromptSource
from onpolicy.rollout.server import require_addresses
from onpolicy.run.launch.engine_specs import rollout_spec
from onpolicy.run.launch.input_checks import require_context
from onpolicy.run.launch.inputs import Inputs, make_ladder
from onpolicy.run.launch.memory_checks import require_cache, require_memory
from onpolicy.run.launch.memory_model import RunMemory
from onpolicy.run.launch.prompt_inputs import PromptReader
from onpolicy.run.launch.push_checks import require_transport
from onpolicy.run.launch.rollouters import make_rollouter
from onpolicy.run.launch.stop_tokens import stop_tokens_of

logger = logging.getLogger(__name__)


def read_inputs(config: TrainConfig, scorer: Scorer) -> Inputs:
    """Read the checkpoint and the evaluation sets; there are no training prompts.

    Raises ConfigError for any error in them.
    """
    make_rollouter(config)
    path, trust = config.model.hf_checkpoint, config.model.trust_remote_code
    key = reveal("--rollout-api-key", config.engine.rollout_api_key)
    require_addresses(config.engine, key, control_key(config.sglang_args, key))
    logger.info("reading %s and the evaluation sets", path)
    hf_config = load_config(path, trust)
    longest, tokenizer = require_context(config, hf_config), load_tokenizer(path, trust)
    ladder = make_ladder(config, hf_config)
    with FlagCheck(rollout_spec(config, hf_config, ladder.contract)) as flags:
        reader = PromptReader(
            config=config,
            scorer=scorer,
            tokenizer=tokenizer,
            vocab_size=hf_config.vocab_size,
            longest=longest,
        )
        sets = {name: reader.read_set(each) for name, each in config.eval_sets.items()}
        firsts = [each.prompts[0] for each in sets.values()]
        if tried := next(
            (prompt for prompt in firsts if not (prompt.rule or prompt.rewards)), None
        ):
            scorer.try_out(tried)
        inputs = Inputs(
            hf_config=hf_config,
            ladder=ladder,
            tokenizer=tokenizer,
            prompts=PromptSource([], config.seed, shuffle=False),
            eval_sets=sets,
            stop_token_ids=stop_tokens_of(config, hf_config, tokenizer),
        )
        require_fit(path, hf_config, trust)
        spec = rollout_spec(config, hf_config, ladder.contract, inputs.longest_sequence(config))
        _require_fits(config, inputs, spec)
        flags.require_passed()
    return inputs


def _require_fits(config: TrainConfig, inputs: Inputs, spec: EngineSpec) -> None:
    """Raise ConfigError if servers, or weights during the push, need more memory than is free."""
    size = ModelSize.of(inputs.hf_config, config.model.trust_remote_code)
    run = RunMemory(config, inputs.hf_config, spec, size)
    processes = [*run.with_push(0, config.engine.num_started), *run.agents()]
    if processes:
        require_memory(processes, spec.contract.device)
    if config.engine.num_started:
        require_cache(spec)
        require_transport(config, spec.contract)
