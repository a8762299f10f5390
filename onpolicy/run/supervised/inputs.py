"""The inputs of `onpolicy sft`, checked before anything is started."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.config.sft import SftConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.models.weight_files import require_fit
from onpolicy.outputs.directory import check_sinks
from onpolicy.rollout.prompt_order import PromptSource
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import rollout_spec
from onpolicy.run.launch.host_shares import hosts_here, placement_of_trainer
from onpolicy.run.launch.input_checks import check_layout
from onpolicy.run.launch.memory_checks import Needs, require_memory
from onpolicy.run.launch.memory_model import RunMemory
from onpolicy.run.launch.stop_tokens import stop_token_ids
from onpolicy.run.saving import digest_sets
from onpolicy.run.supervised.answers import Example, load_examples

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SftInputs:
    """The inputs of a run of `onpolicy sft`, after all checks."""

    hf_config: PretrainedConfig
    contract: NumericsContract
    examples: list[Example]
    eval_examples: list[Example]
    source: PromptSource
    """The order of the examples, by number."""

    num_steps: int
    train_config: TrainConfig
    """The trainer's configuration."""

    needs: Needs
    """The memory needs of its ranks."""

    @property
    def evaluations(self) -> dict[str, str]:
        """Return the result of `digest_sets` for the evaluation rows."""
        measured = [example.prompt for example in self.eval_examples]
        return digest_sets({"": (None, measured)} if measured else {})

    def batch(self, step: int, size: int) -> list[Example]:
        """Return the rows of an optimizer step."""
        places = range(step * size, (step + 1) * size)
        return [self.examples[self.source.at(place).index] for place in places]


def read_inputs(config: SftConfig) -> SftInputs:
    """Read and check the checkpoint and all rows. Raises ConfigError for any error in them."""
    check_sinks(config.output)
    _require_free(config.output.save_hf)
    path, trust = config.model.hf_checkpoint, config.model.trust_remote_code
    logger.info("reading %s and the rows", path)
    hf_config = load_config(path, trust)
    require_fit(path, hf_config, trust)
    data, tokenizer = config.data, load_tokenizer(path, trust)
    longest = hf_config.max_position_embeddings
    load = partial(
        load_examples,
        config=data,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids(
            path, hf_config, tokenizer=tokenizer, of_chats=data.apply_chat_template
        ),
        max_tokens=longest,
    )
    examples = load(data.prompt_data, flag="--prompt-data")
    evaluated = data.eval_prompt_data
    eval_examples = load(evaluated, flag="--eval-prompt-data") if evaluated else []
    num_steps = _num_steps(config, len(examples))
    train_config = config.train_config(num_steps)
    check_layout(train_config)
    contract = contract_for(train_config, hf_config, aligned=config.plan.starts_aligned)
    if not (config.cluster.ray_address or config.dry_run):
        placement_of_trainer(train_config, contract, hosts_here())
    return SftInputs(
        hf_config=hf_config,
        contract=contract,
        examples=examples,
        eval_examples=eval_examples,
        source=PromptSource([e.prompt for e in examples], config.seed, data.shuffle),
        num_steps=num_steps,
        train_config=train_config,
        needs=_needs(config, train_config, hf_config, contract, [*examples, *eval_examples]),
    )


def _require_free(save_hf: str) -> None:
    if save_hf and Path(save_hf).exists():
        raise ConfigError(
            f"--save-hf={save_hf}: is there already, and a model is not written over another. Give "
            "another directory, or remove this one."
        )


def _num_steps(config: SftConfig, num_examples: int) -> int:
    """Return the number of optimizer steps. Raises ConfigError if the rows are too few for one."""
    size = config.trainer.global_batch_size
    if size > num_examples:
        raise ConfigError(
            f"--global-batch-size={size}: --prompt-data={config.data.prompt_data} has {num_examples} "
            "rows, fewer than an optimizer step takes. Lower it, or give more rows."
        )
    if config.max_steps:
        return config.max_steps
    steps, left = divmod(config.num_epoch * num_examples, size)
    if left:
        logger.info("the last %d rows are left out: they do not fill an optimizer step", left)
    return steps


def _needs(
    config: SftConfig,
    train_config: TrainConfig,
    hf_config: PretrainedConfig,
    contract: NumericsContract,
    examples: list[Example],
) -> Needs:
    """Log and return the ranks' memory needs. Raises ConfigError if they exceed the free memory."""
    longest = max(example.num_tokens for example in examples)
    spec = rollout_spec(train_config, hf_config, contract, longest)
    size = ModelSize.of(hf_config, config.model.trust_remote_code)
    run = RunMemory(train_config, hf_config, spec, size)
    ranks = run.sides(config.cluster.num_ranks, 0)
    try:
        require_memory(ranks, contract.device, config.cluster.ray_address, run)
    except ConfigError as error:
        if not config.dry_run:
            raise
        logger.warning("here and now the run would be refused: %s", error)
    return Needs(lambda number, servers: run.sides(number, 0), run)
