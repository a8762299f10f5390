"""A run of supervised fine-tuning: its checked inputs, its trainer, its rows and its files."""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from onpolicy.cluster.placement import hosts_here, placement_of_trainer
from onpolicy.config import TrainConfig
from onpolicy.config.sft_flags import SftConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.models.weight_files import require_fit
from onpolicy.outputs.console import duration, elapsed
from onpolicy.outputs.directory import RunDirectory, check_sinks
from onpolicy.outputs.lock import locked
from onpolicy.outputs.metrics import Sink
from onpolicy.outputs.totals import RunHash, RunTotals
from onpolicy.rollout.prompt_order import PromptSource
from onpolicy.run import saving
from onpolicy.run.launch.cluster_engines import Needs, trainer_on_cluster
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import rollout_spec
from onpolicy.run.launch.input_checks import check_layout
from onpolicy.run.launch.memory import RunMemory, require_memory
from onpolicy.run.launch.stop_tokens import stop_token_ids
from onpolicy.run.learning_rate import LearningRate
from onpolicy.run.supervised.answers import Example, load_examples, samples_of
from onpolicy.training import Trainer
from onpolicy.training.supervised import policy_digest, supervised_loss, supervised_step

logger = logging.getLogger(__name__)

Metrics = dict[str, float]

SILENCE = 2.0


@dataclass(frozen=True, kw_only=True)
class SftInputs:
    """The inputs of a run of `onpolicy sft`, after all checks."""

    hf_config: PretrainedConfig
    contract: NumericsContract
    examples: list[Example]
    eval_examples: list[Example]
    source: PromptSource
    num_steps: int
    train_config: TrainConfig
    needs: Needs

    @property
    def evaluations(self) -> dict[str, str]:
        """Return the result of `digest_sets` for the evaluation rows."""
        measured = [example.prompt for example in self.eval_examples]
        return saving.digest_sets({"": (None, measured)} if measured else {})

    def batch(self, step: int, size: int) -> list[Example]:
        """Return the rows of an optimizer step."""
        places = range(step * size, (step + 1) * size)
        return [self.examples[self.source.at(place).index] for place in places]


def read_inputs(config: SftConfig) -> SftInputs:
    """Read and check the checkpoint and all rows. Raises ConfigError for any error in them."""
    check_sinks(config.output)
    if (save_hf := config.output.save_hf) and Path(save_hf).exists():
        raise ConfigError(
            f"--save-hf={save_hf}: is there already, and a model is not written over another. Give "
            "another directory, or remove this one."
        )
    path, trust = config.model.hf_checkpoint, config.model.trust_remote_code
    logger.info("reading %s and the rows", path)
    hf_config = load_config(path, trust)
    require_fit(path, hf_config, trust)
    data, tokenizer = config.data, load_tokenizer(path, trust)
    chats = data.apply_chat_template
    load = partial(
        load_examples,
        config=data,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids(path, hf_config, tokenizer=tokenizer, of_chats=chats),
        max_tokens=hf_config.max_position_embeddings,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSummary:
    """The result of a run."""

    steps: int
    loss: float
    run_hash: str
    """A hash that is equal for two runs whose losses and weights are equal bit by bit."""


def fine_tune(config: SftConfig, inputs: SftInputs) -> SftSummary:
    """Take all remaining optimizer steps, and write the checkpoints and the model."""
    prompts = [example.prompt for example in inputs.examples]
    with ExitStack() as stack:
        if save := config.output.save:
            stack.enter_context(locked(Path(save), "--save"))
        resumed = saving.find(config, prompts, inputs.evaluations)
        if save:
            saving.require_room(config, inputs.hf_config)
        directory = RunDirectory.of(config, resumed.config if resumed else None)
        stack.callback(directory.close)
        first = resumed.state.rollouts_done if resumed else 0
        directory.write_records(config, inputs.contract, first)
        stack.enter_context(directory.log_file())
        asked = inputs.train_config, inputs.contract, inputs.needs, directory.logs
        trainer = stack.enter_context(trainer_on_cluster(*asked))
        sinks = stack.enter_context(directory.opened_sinks(config, first))
        return SupervisedRun(config, inputs, trainer, directory, sinks, resumed).go()


class SupervisedRun:
    """The optimizer steps on rows, with a given trainer, from scratch or from a checkpoint."""

    def __init__(
        self,
        config: SftConfig,
        inputs: SftInputs,
        trainer: Trainer,
        directory: RunDirectory,
        sinks: Sequence[Sink],
        resumed: saving.Checkpoint | None = None,
    ):
        self.config, self.inputs, self.trainer = config, inputs, trainer
        self._directory, self._sinks = directory, sinks
        self.learning_rate = LearningRate(inputs.train_config)
        self.steps_done, self.run_hash, self._spoken = 0, RunHash(), 0.0
        self._prompts = saving.digest_prompts([example.prompt for example in inputs.examples])
        if resumed is not None:
            self.steps_done = resumed.state.rollouts_done
            self.run_hash = RunHash(resumed.state.run_hash)
            self.learning_rate.load_state_dict(resumed.state.learning_rate)
            trainer.load(resumed.directory)
            logger.info("resumed from %s", resumed.directory)

    def go(self) -> SftSummary:
        """Take every step, and write the model at the end."""
        metrics: Metrics = {}
        output = self.config.output
        while self.steps_done < self.inputs.num_steps:
            if self._is_due(self.config.data.eval_interval):
                self._evaluate()
            metrics = self._step()
            is_last = self.steps_done == self.inputs.num_steps
            if output.save and (is_last or self._is_due(output.save_interval)):
                self._save()
        self._evaluate()
        digest = self.trainer.on_each_rank(policy_digest)[0]
        self.run_hash.add_step([], metrics.get("train/loss", 0.0), digest)
        if output.save_hf:
            self._export(Path(output.save_hf))
        return SftSummary(
            steps=self.steps_done,
            loss=metrics.get("train/loss", 0.0),
            run_hash=self.run_hash.value,
        )

    def _step(self) -> Metrics:
        started = time.perf_counter()
        rows = self.inputs.batch(self.steps_done, self.config.trainer.global_batch_size)
        (rate,) = self.learning_rate.next_rates(1, 1.0)
        found = self.trainer.on_each_rank(supervised_step, samples_of(rows), rate)[0]
        metrics = {**found, "perf/step_time": time.perf_counter() - started}
        self.run_hash.add_step([], metrics["train/loss"], "")
        self._log(self.steps_done, metrics)
        self.steps_done += 1
        self._say(metrics)
        return metrics

    def _is_due(self, interval: int) -> bool:
        return self.steps_done % interval == 0 if interval else self.steps_done == 0

    def _evaluate(self) -> None:
        if not self.inputs.eval_examples:
            return
        evaluated = samples_of(self.inputs.eval_examples)
        loss = self.trainer.on_each_rank(supervised_loss, evaluated)[0]
        self._log(self.steps_done, {"eval/loss": loss})
        print(f"step {self.steps_done}  eval loss {loss:.4f}", flush=True)

    def _log(self, step: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            with self._directory.writing():
                sink.log(step, metrics)

    def _say(self, metrics: Metrics) -> None:
        done, total = self.steps_done, self.inputs.num_steps
        if elapsed() - self._spoken < SILENCE and done < total:
            return
        self._spoken = elapsed()
        print(
            f"step {done}/{total}  loss {metrics['train/loss']:.4f}  lr {metrics['train/lr']:.2e}  "
            f"{metrics['perf/train_tokens_per_second']:,.0f} tokens/s  {duration(elapsed())} elapsed",
            flush=True,
        )

    def _save(self) -> None:
        state = saving.RunState(
            rollouts_done=self.steps_done,
            run_hash=self.run_hash.value,
            totals=RunTotals(),
            governor={},
            learning_rate=self.learning_rate.state_dict(),
            prompts=self._prompts,
            evaluations=self.inputs.evaluations,
        )
        saving.save(self.config, self, state)

    def room(self) -> AbstractContextManager[None]:
        """Do nothing: no server shares the trainer's memory."""
        return nullcontext()

    def _export(self, directory: Path) -> None:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = directory.with_name(f".partial_{directory.name}")
        with self._directory.writing():
            self.trainer.export(partial)
            partial.rename(directory)
        logger.info("wrote %s", directory)
