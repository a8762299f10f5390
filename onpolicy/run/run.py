"""The verbs of the loop: what one training run does with its engines, data and files."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PretrainedConfig

from onpolicy.algorithm.advantages import group_advantages
from onpolicy.config import TrainConfig
from onpolicy.config.groups import RewardConfig
from onpolicy.contract import NumericsContract
from onpolicy.outputs.directory import RunDirectory
from onpolicy.outputs.lock import locked
from onpolicy.outputs.metrics import Sink
from onpolicy.outputs.plot import plot_run
from onpolicy.outputs.progress import Progress
from onpolicy.outputs.run_hash import RunHash
from onpolicy.outputs.samples import SampleLog
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.sampling import group_samples, make_requests
from onpolicy.rollout.statistics import (
    eval_metrics,
    mean_response_length,
    rollout_metrics,
    truncated_ratio,
)
from onpolicy.run import saving
from onpolicy.run.engines import EnginePair
from onpolicy.run.learning_rate import LearningRate
from onpolicy.run.start import Inputs
from onpolicy.train import distributed
from onpolicy.types import (
    Prompt,
    RunSummary,
    RunTotals,
    Sample,
    SampleGroup,
    SamplingParams,
    TrainSample,
)
from onpolicy.weights.transports.disk import remove_leftovers

logger = logging.getLogger(__name__)

Metrics = dict[str, float]
MakeEngines = Callable[[TrainConfig, PretrainedConfig, NumericsContract, Path], EnginePair]


class Run:
    """One training run, as every rank sees it. Rank 0 also scores, logs and draws."""

    engines: EnginePair

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        *,
        make_engines: MakeEngines = EnginePair,
        make_scorer: Callable[[RewardConfig], Scorer] = Scorer,
    ):
        self.config, self.inputs = config, inputs
        self._make_engines, self._make_scorer = make_engines, make_scorer
        self.is_main = distributed.rank() == 0
        self.ladder, self.learning_rate = inputs.ladder, LearningRate(config)
        self.first_step = self.rollouts_done = 0
        self.run_hash, self.totals = RunHash(), RunTotals()
        self._sinks: list[Sink] = []
        self._on_exit = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        if error[1] is not None:
            logger.debug("the run stopped", exc_info=error)
        self._on_exit.close()

    def _start(self) -> None:
        config = self.config
        torch.manual_seed(config.seed)
        resumed = distributed.run_on_rank_zero(self._find_checkpoint)
        if resumed is not None:
            self._continue(resumed.state)
        run_dir = Path(config.output.run_dir)
        hf_config, contract = self.inputs.hf_config, self.ladder.contract
        self.engines = self._make_engines(config, hf_config, contract, run_dir)
        distributed.run_on_rank_zero(lambda: self._open_directory(resumed))
        logger.debug("starts after %d rollouts; %s", self.first_step, config.batch_equation())
        self._on_exit.callback(self.engines.stop)
        self.engines.start()
        self._use_ladder()
        if resumed is not None:
            self.engines.trainer.load(resumed.directory)
            logger.info("resumed from %s", resumed.directory)
        if self.is_main:
            self._open_outputs()

    def _find_checkpoint(self) -> saving.Checkpoint | None:
        """With --save this run's alone from here on, and known to have room."""
        save = self.config.output.save
        self._hold_save()
        found = saving.find(self.config, self.inputs.prompts.prompts)
        if save:
            saving.require_room(self.config, self.inputs.hf_config)
        return found

    def _hold_save(self) -> None:
        if save := self.config.output.save:
            self._on_exit.enter_context(locked(Path(save), "--save"))

    def _continue(self, state: saving.RunState) -> None:
        self.first_step = self.rollouts_done = state.rollouts_done
        self.run_hash, self.totals = RunHash(state.run_hash), state.totals
        self.ladder.load_state_dict(state.governor)
        self.learning_rate.load_state_dict(state.learning_rate)

    def _open_directory(self, resumed: saving.Checkpoint | None) -> None:
        self._directory = RunDirectory.of(self.config, resumed.config if resumed else None)
        self._on_exit.callback(self._directory.close)
        self._hold_save()  # an empty one in an earlier run's directory has gone aside with it
        remove_leftovers(self._directory.path)
        self._directory.write_records(self.config, self.ladder.contract, self.first_step)
        self._on_exit.enter_context(self._directory.log_file())

    def _open_outputs(self) -> None:
        config = self.config
        self._scorer = self._make_scorer(config.reward)
        self._on_exit.callback(self._scorer.close)
        opened = self._directory.opened_sinks(config, self.first_step)
        self._sinks = self._on_exit.enter_context(opened)
        self._samples = SampleLog(
            self._directory.samples, self._text, config.output.log_samples, self.first_step
        )
        self._progress = Progress(config.rollout.num_rollout, self.first_step)
        self._on_exit.callback(self._progress.close)
        self.engines.on_progress = self._progress.on_response

    def push_weights(self) -> Metrics:
        """Give the rollout the trainer's weights, verified."""
        started = time.perf_counter()
        if not self.engines.weight_version:
            logger.info("pushing the trainer's weights to the servers")
        self.engines.push_weights(str(self.rollouts_done))
        return {"perf/weight_sync_time": time.perf_counter() - started}

    def roll_out(self, step: int) -> tuple[list[SampleGroup], Metrics]:
        """Sample and score the prompts of a step."""
        rollout = self.config.rollout
        prompts = self.inputs.prompts.batch(step, rollout.rollout_batch_size)
        params = self._sampling(rollout.rollout_temperature, rollout.rollout_max_response_len)
        params = replace(params, return_routed_experts=self.engines.replays_routing)
        seeds = (self.config.seed, "rollout", step)
        groups, metrics = self._sample(prompts, rollout.n_samples_per_prompt, params, *seeds)
        if self.is_main and step == self.first_step:
            logger.info("%s", self._samples.describe(groups[0].samples[0]))
        return groups, {**rollout_metrics(groups), **metrics}

    def evaluate_if_due(self, step: int) -> None:
        """Sample and score the evaluation sets, before the first and after each k-th rollout."""
        interval = self.config.eval.eval_interval
        if interval and step % interval == 0:
            for name, prompts in self.inputs.eval_sets.items():
                self._evaluate(step, name, prompts)

    def _evaluate(self, step: int, name: str, prompts: list[Prompt]) -> None:
        """Sample and score one evaluation set; another set beside it changes nothing."""
        evaluation = self.config.eval
        length = evaluation.eval_max_response_len or self.config.rollout.rollout_max_response_len
        params = self._sampling(evaluation.eval_temperature, length)
        count = evaluation.n_samples_per_eval_prompt
        seeds = ["eval", name] if name else ["eval"]
        groups, _ = self._sample(prompts, count, params, self.config.seed, *seeds)
        metrics = eval_metrics(groups, name)
        self._log(step, metrics)
        if self.is_main:
            self._write_samples(f"eval_{name}" if name else "eval", step, groups)
            numbers = "  ".join(f"{k.split('/')[-1]} {v:.4g}" for k, v in metrics.items())
            logger.info("after %d rollouts, %s: %s", step, name or "evaluation", numbers)

    def _sampling(self, temperature: float, max_new_tokens: int) -> SamplingParams:
        rollout = self.config.rollout
        return SamplingParams(
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self.inputs.stop_token_ids,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            min_p=rollout.rollout_min_p,
        )

    def _sample(
        self, prompts: list[Prompt], count: int, params: SamplingParams, *seeds: int | str
    ) -> tuple[list[SampleGroup], Metrics]:
        started = time.perf_counter()
        requests = make_requests(prompts, count, params, *seeds)
        if self.is_main:
            self._progress.on_requests(len(requests))
        completions = self.engines.generate(requests)
        seconds = time.perf_counter() - started
        tokens = sum(len(completion.response_ids) for completion in completions)

        def score() -> tuple[list[SampleGroup], Metrics]:
            texts = self.inputs.tokenizer.batch_decode(
                [completion.response_ids for completion in completions], skip_special_tokens=True
            )
            groups = group_samples(prompts, completions, texts, self.engines.weight_version)
            return groups, self._scorer.score(_samples(groups))

        groups, metrics = distributed.run_on_rank_zero(score)
        metrics["perf/rollout_tokens_per_second"] = tokens / seconds
        metrics["perf/rollout_time"] = time.perf_counter() - started
        return groups, metrics

    def _write_samples(self, name: str, step: int, groups: Sequence[SampleGroup]) -> None:
        with self._directory.writing():
            self._samples.write(name, step, groups)

    def _text(self, token_ids: list[int]) -> str:
        """Tokens as text in which special tokens can be seen."""
        return str(self.inputs.tokenizer.decode(token_ids))

    def train(self, groups: Sequence[SampleGroup], step: int) -> Metrics:
        """Turn rewards into advantages, and take the optimizer steps of a rollout.

        However that ends, some of its samples are in the run directory then.
        """
        try:
            metrics = self._train(groups, step)
        finally:
            if self.is_main and step % self.config.output.log_samples_interval == 0:
                self._write_samples("rollout", step, groups)
        self.rollouts_done += 1
        return metrics

    def _train(self, groups: Sequence[SampleGroup], step: int) -> Metrics:
        algorithm, trainer = self.config.algorithm, self.engines.trainer
        self.learning_rate.observe(mean_response_length(groups), truncated_ratio(groups))
        kept = [
            g for g in groups if not algorithm.filter_equal_rewards or len(set(_rewards(g))) > 1
        ]
        metrics = {"rollout/num_filtered_groups": float(len(groups) - len(kept))}
        if not kept:
            logger.warning("rollout %d: all groups have equal rewards; nothing to learn from", step)
            return metrics
        advantages = group_advantages(
            [_rewards(group) for group in kept],
            algorithm.advantage_estimator,
            [[len(sample.rollout_log_probs) for sample in group.samples] for group in kept],
        )
        samples = [
            TrainSample(sample=sample, advantage=advantage)
            for group, values in zip(kept, advantages, strict=True)
            for sample, advantage in zip(group.samples, values, strict=True)
        ]
        num_steps = min(self.config.steps_per_rollout, len(samples))
        rates = self.learning_rate.next_rates(num_steps, self.ladder.lr_scale)
        metrics |= self.learning_rate.metrics()
        try:
            return {**trainer.train(samples, step, rates), **metrics}
        finally:
            for sample, count in zip(_samples(kept), trainer.mismatched_tokens, strict=False):
                sample.mismatched_tokens = count

    def govern(self, step: int, metrics: Metrics) -> Metrics:
        """Let the governor, if there is one, change what the engines run on."""
        move = self.ladder.update(metrics)
        if move is not None:
            if self.is_main:
                logger.warning("governor: %s -> %s (%s)", move.before, move.after, move.reason)
                self._directory.record_move(step, move.before, move.after, move.reason)
            self._use_ladder()
        return self.ladder.metrics()

    def _use_ladder(self) -> None:
        self.engines.use(self.ladder.contract, self.ladder.fallback)

    def record(self, step: int, groups: Sequence[SampleGroup], metrics: Metrics) -> None:
        """Log a finished step, and add it to the run's hash and totals."""
        self.totals = self.totals.plus(metrics, is_first=step == 0)
        loss = metrics.get("train/loss", 0.0)
        self.run_hash.add_step(groups, loss, self.engines.weight_digest)
        self._log(step, metrics)
        if self.is_main:
            self._progress.on_step(step, metrics)

    def _log(self, step: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            with self._directory.writing():
                sink.log(step, metrics)

    def save_if_due(self) -> None:
        """Write a checkpoint after every k-th rollout, and after the last."""
        interval, done = self.config.output.save_interval, self.rollouts_done
        if interval and (done % interval == 0 or done == self.config.rollout.num_rollout):
            state = saving.RunState(
                rollouts_done=done,
                run_hash=self.run_hash.value,
                totals=self.totals,
                governor=self.ladder.state_dict(),
                learning_rate=self.learning_rate.state_dict(),
                prompts=saving.digest_prompts(self.inputs.prompts.prompts),
            )
            saving.save(self.config, self.engines, state)

    def summary(self) -> RunSummary:
        """The run in a few numbers; draws the plot."""
        if self.is_main:
            self._draw()
        logger.debug("finished; run hash %s", self.run_hash.value)
        return RunSummary(
            run_dir=self.config.output.run_dir,
            run_hash=self.run_hash.value,
            rollouts=self.rollouts_done,
            totals=self.totals,
        )

    def _draw(self) -> None:
        try:
            plot_run(self._directory.metrics_file, self._directory.plots / "training.png")
        except OSError as error:  # no reason to lose a finished run's summary
            logger.warning("the plot could not be written (%s)", error)


def _samples(groups: Sequence[SampleGroup]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def _rewards(group: SampleGroup) -> list[float]:
    return [sample.reward for sample in group.samples]
