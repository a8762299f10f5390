"""A run of supervised fine-tuning: its trainer, its rows and its files."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from onpolicy.config.sft import SftConfig
from onpolicy.outputs.console import duration, elapsed
from onpolicy.outputs.directory import RunDirectory
from onpolicy.outputs.lock import locked
from onpolicy.outputs.metrics import Sink
from onpolicy.outputs.run_hash import RunHash
from onpolicy.outputs.totals import RunTotals
from onpolicy.run import saving
from onpolicy.run.launch.cluster_engines import trainer_on_cluster
from onpolicy.run.learning_rate import LearningRate
from onpolicy.run.saving.checkpoint import Checkpoint, digest_prompts
from onpolicy.run.supervised.answers import Example, samples_of
from onpolicy.run.supervised.inputs import SftInputs
from onpolicy.train import Trainer
from onpolicy.train.supervised import policy_digest, supervised_loss, supervised_step

logger = logging.getLogger(__name__)

Metrics = dict[str, float]

SILENCE = 2.0
"""The least number of seconds between two lines of progress."""


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
        resumed: Checkpoint | None = None,
    ):
        self.config, self.inputs, self.trainer = config, inputs, trainer
        self._directory, self._sinks = directory, sinks
        self.learning_rate = LearningRate(inputs.train_config)
        self.steps_done, self.run_hash, self._spoken = 0, RunHash(), 0.0
        self._prompts = digest_prompts([example.prompt for example in inputs.examples])
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
        loss = self._loss(self.inputs.eval_examples)
        self._log(self.steps_done, {"eval/loss": loss})
        print(f"step {self.steps_done}  eval loss {loss:.4f}", flush=True)

    def _loss(self, examples: Sequence[Example]) -> float:
        return self.trainer.on_each_rank(supervised_loss, samples_of(examples))[0]

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
        """Write the whole model atomically."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = directory.with_name(f".partial_{directory.name}")
        with self._directory.writing():
            self.trainer.export(partial)
            partial.rename(directory)
        logger.info("wrote %s", directory)
