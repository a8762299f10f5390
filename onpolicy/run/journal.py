"""A run's journal, which writes down and shows its events.

`evaluate` logs an evaluation even if it fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from rich.console import Console

from fallback_correction.governor import Move
from onpolicy.config import TrainConfig
from onpolicy.errors import OnPolicyError
from onpolicy.outputs import recorded_order
from onpolicy.outputs.directory import RunDirectory
from onpolicy.outputs.metrics import Sink
from onpolicy.outputs.progress import Progress
from onpolicy.outputs.samples import FailedAttempt, SampleLog
from onpolicy.run.sampler import Sampler
from onpolicy.types import SampleGroup

logger = logging.getLogger(__name__)

Metrics = dict[str, float]

OnMetrics = Callable[[int, Mapping[str, float]], None]
"""A function that is called with each rollout's number and metrics, and each evaluation's."""


@dataclass(frozen=True, eq=False)
class Journal:
    """The writer of a run's events: into its directory, to the trackers given, and on the console."""

    directory: RunDirectory
    sinks: Sequence[Sink]
    samples: SampleLog
    progress: Progress
    first_step: int
    on_metrics: OnMetrics | None = None

    @classmethod
    @contextmanager
    def opened(
        cls,
        config: TrainConfig,
        directory: RunDirectory,
        decode: Callable[[list[int]], str],
        first_step: int,
        console: Console | None = None,
        on_metrics: OnMetrics | None = None,
    ) -> Iterator[Journal]:
        """Open the journal of a run that starts with `first_step`. `decode` turns tokens into text,
        special tokens included. Progress is shown on `console`, or on standard output. What
        `on_metrics` raises ends the run."""
        output, num_rollout = config.output, config.rollout.num_rollout
        with directory.opened_sinks(config, first_step) as sinks:
            samples = SampleLog(directory.samples, decode, output.log_samples, first_step)
            with closing(Progress(num_rollout, first_step, console)) as progress:
                yield cls(directory, sinks, samples, progress, first_step, on_metrics)

    def on_rollout(
        self,
        step: int,
        groups: Sequence[SampleGroup],
        failed: Sequence[FailedAttempt],
        weights: str = "",
    ) -> None:
        """Record a rollout that was sampled and scored, and the failed attempts at its episodes.
        `weights`: the digest of those that learn from it, for an asynchronous run's journal."""
        self._write_failed("rollout", step, failed)
        if weights:
            with self.directory.writing():
                record = recorded_order.record_of(step, weights, groups)
                recorded_order.add(self.directory.rollouts, record)
        first = next((sample for group in groups for sample in group.samples), None)
        if step == self.first_step and first is not None:
            logger.info("%s", self.samples.describe(first))

    def on_evaluation(
        self,
        step: int,
        name: str,
        groups: Sequence[SampleGroup],
        metrics: Metrics,
        failed: Sequence[FailedAttempt],
    ) -> None:
        """Record an evaluation set that was scored after `step` rollouts, and its failed attempts."""
        self._log(step, metrics)
        self.write_samples(_eval_file(name), step, groups)
        self._write_failed(_eval_file(name), step, failed)
        numbers = "  ".join(f"{k.split('/')[-1]} {v:.4g}" for k, v in metrics.items())
        logger.info("after %d rollouts, %s: %s", step, name or "evaluation", numbers)

    def on_training(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Mark the shown samples before a rollout is trained on, so that the trainer reports on them."""
        for sample in self.samples.shown(groups):
            sample.is_shown = True

    @contextmanager
    def failing(
        self,
        step: int,
        failed: Callable[[], Sequence[FailedAttempt]],
        eval_set: str | None = None,
    ) -> Iterator[None]:
        """Write the attempts that failed so far if the body, which samples, raises."""
        try:
            yield
        except OnPolicyError:
            name = "rollout" if eval_set is None else _eval_file(eval_set)
            self._write_failed(name, step, failed())
            raise

    def on_move(self, step: int, move: Move) -> None:
        """Record a move of the governor to another rung."""
        logger.warning("governor: %s -> %s (%s)", move.before, move.after, move.reason)
        self.directory.record_move(step, move.before, move.after, move.reason)

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of a finished step."""
        self._log(step, metrics)
        self.progress.on_step(step, metrics)

    def _log(self, step: int, metrics: Metrics) -> None:
        for sink in self.sinks:
            with self.directory.writing():
                sink.log(step, metrics)
        if self.on_metrics is not None:
            self.on_metrics(step, metrics)

    def write_samples(self, name: str, step: int, groups: Sequence[SampleGroup]) -> None:
        """Record the shown samples of a rollout or an evaluation, after training if there is any."""
        with self.directory.writing():
            self.samples.write(name, step, groups)

    def _write_failed(self, name: str, step: int, failed: Sequence[FailedAttempt]) -> None:
        with self.directory.writing():
            self.samples.write_failed(name, step, failed)


def _eval_file(name: str) -> str:
    """Return the name of an evaluation set's sample files."""
    return f"eval_{name}" if name else "eval"


def evaluate(sampler: Sampler, journal: Journal, name: str, step: int) -> dict[str, float]:
    """Sample and score an evaluation set after `step` rollouts; return its metrics."""
    with journal.failing(step, sampler.failed_so_far, name):
        groups, metrics, failed = sampler.evaluate(name)
    journal.on_evaluation(step, name, groups, metrics, failed)
    return metrics
