"""The parts of a training step, as methods of a run with its engines, data and files."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from onpolicy.config import TrainConfig
from onpolicy.config.groups import RewardConfig
from onpolicy.errors import ParityError
from onpolicy.outputs.directory import RunDirectory
from onpolicy.outputs.lock import locked
from onpolicy.outputs.recorded_order import begin as begin_journal
from onpolicy.outputs.totals import RunHash, RunSummary, RunTotals
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.rollouter import Rollouter
from onpolicy.rollout.statistics import idle_shares, mean_response_length, truncated_ratio
from onpolicy.run import saving, train_samples
from onpolicy.run.cases import make_case, write_case
from onpolicy.run.drawing import make_drawing
from onpolicy.run.engines import EnginePair
from onpolicy.run.journal import Journal, OnMetrics, evaluate
from onpolicy.run.launch.inputs import Inputs, make_rollouter
from onpolicy.run.learning_rate import LearningRate
from onpolicy.run.probe import Probe
from onpolicy.run.sampler import Sampler
from onpolicy.run.saving.rollouts import is_the_same_run, read_rollouts, write_rollouts
from onpolicy.run.teacher_servers import TeacherServers
from onpolicy.trajectory import UNPUSHED
from onpolicy.types import ParityFindings, Sample, SampleGroup
from onpolicy.weights.transports.disk import remove_leftovers

logger = logging.getLogger(__name__)

Metrics = dict[str, float]


class Run:
    """A training run: its engines, its data and its files."""

    engines: EnginePair
    journal: Journal
    sampler: Sampler
    best: saving.Best | None

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        *,
        make_engines: Callable[..., EnginePair] = EnginePair,
        make_scorer: Callable[[RewardConfig], Scorer] = Scorer,
        rollouter: Rollouter | None = None,
        console: Console | None = None,
        on_metrics: OnMetrics | None = None,
    ):
        self.config, self.inputs, self.contract = config, inputs, inputs.contract
        self._make_engines, self._make_scorer = make_engines, make_scorer
        self._rollouter = rollouter or make_rollouter(config)
        self._console, self._on_metrics = console, on_metrics
        self.ladder, self.learning_rate = inputs.ladder, LearningRate(config)
        self.first_step = self.rollouts_done = 0
        self.run_hash, self.totals, self.best = RunHash(), RunTotals(), None
        self._probed: Metrics = {}
        self._ask_teachers = TeacherServers(config).score
        self._is_free, self._on_exit = config.rollout.rollout_schedule == "free", ExitStack()

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
        resumed = self._find_checkpoint()
        if resumed is not None:
            self._continue(resumed.state)
        given = config, self.inputs.hf_config, self.contract, Path(config.output.run_dir)
        longest = self.inputs.longest_sequence(config)
        self.engines = self._make_engines(*given, longest_sequence=longest)
        self._open_directory(resumed)
        logger.debug("starts after %d rollouts; %s", self.first_step, config.batch_equation())
        self._on_exit.callback(self.engines.stop)
        self._scorer = self._on_exit.enter_context(closing(self._make_scorer(config.reward)))
        self.engines.start()
        self._scorer.start()
        self._climb()
        if resumed is not None:
            saving.take_over(resumed, config, self.engines)
        self._open_outputs()
        self._begin_rollouts(resumed)

    def _find_checkpoint(self) -> saving.Checkpoint | None:
        """Return the checkpoint to resume from, if any; lock --save, and check the room on its disk."""
        self._hold_save()
        found = saving.find(self.config, self.inputs.prompts.prompts, self.inputs.evaluations)
        if self.config.output.save:
            saving.require_room(self.config, self.inputs.hf_config, self.contract.adapter)
        return found

    def _hold_save(self) -> None:
        if save := self.config.output.save:
            self._on_exit.enter_context(locked(Path(save), "--save"))

    def _continue(self, state: saving.RunState) -> None:
        self.first_step = self.rollouts_done = state.rollouts_done
        self.run_hash, self.totals, self.best = RunHash(state.run_hash), state.totals, state.best
        if self.ladder is not None:
            self.ladder.load_state_dict(state.governor)
            self.contract = self.ladder.contract
        self.learning_rate.load_state_dict(state.learning_rate)

    def _open_directory(self, resumed: saving.Checkpoint | None) -> None:
        self._directory = RunDirectory.of(self.config, resumed.config if resumed else None)
        self._on_exit.callback(self._directory.close)
        self._hold_save()  # an empty directory inside an earlier run's was moved away with it
        remove_leftovers(self._directory.path)
        self._on_exit.callback(remove_leftovers, self._directory.path)
        self._directory.write_records(self.config, self.contract, self.first_step)
        self._on_exit.enter_context(self._directory.log_file())

    def _open_outputs(self) -> None:
        """Open the journal, and make the sampler and the probe."""
        config = self.config
        text: Any = self.inputs.tokenizer.decode  # special tokens can be seen in it
        given = config, self._directory, text, self.first_step, self._console, self._on_metrics
        opened = Journal.opened(*given)
        self.journal = self._on_exit.enter_context(opened)
        self.engines.on_progress = self.journal.progress.on_response
        on_requests = self.journal.progress.on_requests
        parts = config, self.inputs, self.engines, self._scorer, on_requests
        self.sampler = Sampler(*parts, self._rollouter, self._directory.observations)
        self._on_exit.callback(self.sampler.close)
        self.probe = Probe(config, self.inputs, self.engines)

    def _begin_rollouts(self, resumed: saving.Checkpoint | None) -> None:
        """Make the source of rollouts; restore a checkpoint's rollouts if it is of the same run."""
        self.sampler.open.next_number = self.first_step * self.config.rollout.rollout_batch_size
        prompts = saving.digest_prompts(self.inputs.prompts.prompts)
        if self._is_free:
            with self._directory.writing():
                began = self.first_step, self.config.to_dict(), prompts
                begin_journal(self._directory.rollouts, *began)
        self.rollouts = make_drawing(self.sampler, self.engines, self.first_step)
        self._on_exit.callback(self.rollouts.close)
        if resumed is not None and is_the_same_run(self.config, prompts, resumed):
            read_rollouts(resumed.directory, self.sampler, self.rollouts)

    def push_weights(self) -> Metrics:
        """Push the trainer's weights to the rollout, which checks their digest."""
        started = time.perf_counter()
        if self.engines.weight_version == UNPUSHED:
            logger.info("pushing the trainer's weights to the servers")
        self.engines.push_weights(self.rollouts_done)
        return {"perf/weight_sync_time": time.perf_counter() - started}

    def probe_engines(self) -> Metrics:
        """Compare engines and trainer after a push, if samples may be stale in training."""
        started = time.perf_counter()
        self._probed = self.probe.compare() if self.config.plan.may_lag else {}
        return {**self._probed, "perf/probe_time": time.perf_counter() - started}

    def roll_out(self, step: int) -> tuple[list[SampleGroup], Metrics]:
        """Return a step's samples, scored, and the rollout's metrics."""
        with self.journal.failing(step, self.sampler.failed_so_far):
            groups, metrics, failed = self.rollouts.take(step)
        weights = self.engines.weight_digest if self._is_free else ""
        self.journal.on_rollout(step, groups, failed, weights)
        return groups, metrics

    def settle_drawing(self) -> Metrics:
        """Wait until nothing is being sampled under these weights."""
        started = time.perf_counter()
        rollout_time = self.rollouts.settle()
        waited = time.perf_counter() - started
        return {"perf/rollout_time": rollout_time, "perf/rollout_wait_time": waited}

    def evaluate_if_due(self, step: int) -> None:
        """Sample and score the evaluation sets that are due after `step` rollouts, 0 included."""
        for name, each in self.inputs.eval_sets.items():
            if each.settings.is_due(step):
                metrics = evaluate(self.sampler, self.journal, name, step)
                self.best = saving.better(self.config.output, self.best, step, metrics)

    def train(self, groups: Sequence[SampleGroup], step: int) -> Metrics:
        """Take the optimizer steps of a rollout. Some samples are written even if training fails."""
        try:
            metrics = self._train(groups, step)
        finally:
            self.journal.write_samples("rollout", step, groups)
        self.rollouts_done += 1
        return metrics

    def _train(self, groups: Sequence[SampleGroup], step: int) -> Metrics:
        self.learning_rate.observe(mean_response_length(groups), truncated_ratio(groups))
        kept = train_samples.worth_training(groups, self.config)
        metrics = {"rollout/num_filtered_groups": float(len(groups) - len(kept))}
        if not kept:
            scored = any(group.rewards for group in groups)
            why = "all groups have equal rewards" if scored else "no sample could be scored"
            logger.warning("rollout %d: %s; nothing to learn from", step, why)
            return metrics
        self.engines.make_room()
        self.journal.on_training(step, groups)
        version = step if self.config.plan.may_lag else None
        samples = train_samples.make_train_samples(kept, version)
        num_steps = min(self.config.steps_per_rollout, len({s.episode for s in samples}))
        scale = self.ladder.lr_scale if self.ladder else 1.0
        rates = self.learning_rate.next_rates(num_steps, scale)
        try:
            outcome = self.engines.trainer.train(self._ask_teachers(samples), step, rates)
        except ParityError as error:
            self._note(error.findings, samples, groups, step)
            raise
        self._note(outcome.findings, samples, groups, step)
        for number, learnt in outcome.learnt.items():
            samples[number].learnt = learnt
        return {**outcome.metrics, **metrics, **self.learning_rate.metrics()}

    def _note(
        self,
        findings: ParityFindings | None,
        trained: Sequence[Sample],
        groups: Sequence[SampleGroup],
        step: int,
    ) -> None:
        """Store the findings in the samples; write the first that differs as a case."""
        if findings is None:
            return
        for one, count in zip(trained, findings.mismatched_tokens, strict=True):
            one.mismatched_tokens = count
        if findings.apart is not None:
            number, log_probs = findings.apart
            sample = trained[number]
            given = self.sampler.request_of(sample, groups), sample, log_probs, step, self.engines
            with self._directory.writing():
                write_case(make_case(*given), Path(self.config.output.case_file(step)))

    def govern(self, step: int, metrics: Metrics) -> Metrics:
        """Let the governor, if there is one, change contract and corrections, after sampling is idle.
        Where samples are stale, it decides by the probe of the weights that they are sampled under."""
        if self.ladder is None:
            return {}
        move = self.ladder.update({**metrics, **self._probed})
        if move is not None:
            self.rollouts.drain()
            self.journal.on_move(step, move)
            self._climb()
        return self.ladder.metrics()

    def _climb(self) -> None:
        if self.ladder is not None:
            self.engines.use(self.ladder.contract, self.ladder.fallback, self.ladder.centers)

    def record(self, step: int, groups: Sequence[SampleGroup], metrics: Metrics) -> None:
        """Log a finished step, and add it to the run's hash and totals."""
        metrics = {**metrics, **idle_shares(metrics)}
        self.totals = self.totals.plus(metrics, is_first=step == 0)
        loss, may_lag = metrics.get("train/loss", 0.0), self.config.plan.may_lag
        self.run_hash.add_step(groups, loss, self.engines.weight_digest, with_spans=may_lag)
        self.journal.on_step(step, metrics)

    def save_if_due(self) -> None:
        """Write a checkpoint after every k-th rollout, and after the last."""
        interval, done = self.config.output.save_interval, self.rollouts_done
        if interval and (done % interval == 0 or done == self.config.rollout.num_rollout):
            state = saving.RunState(
                rollouts_done=done,
                run_hash=self.run_hash.value,
                totals=self.totals,
                governor={} if self.ladder is None else self.ladder.state_dict(),
                learning_rate=self.learning_rate.state_dict(),
                prompts=saving.digest_prompts(self.inputs.prompts.prompts),
                evaluations=self.inputs.evaluations,
                best=self.best,
                weights=self.engines.weight_digest,
            )
            write = partial(write_rollouts, sampler=self.sampler, rollouts=self.rollouts)
            saving.save(self.config, self.engines, state, write)

    def summary(self) -> RunSummary:
        """Return the run's summary, after writing its hash into the log."""
        logger.debug("run hash %s", self.run_hash.value)
        return RunSummary(
            run_dir=self.config.output.run_dir,
            run_hash=self.run_hash.value,
            rollouts=self.rollouts_done,
            totals=self.totals,
        )
