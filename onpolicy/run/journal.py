"""A run's journal, which writes down and shows its events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from rich.console import Console

from fallback_correction.governor import Move
from onpolicy.config import TrainConfig
from onpolicy.errors import OnPolicyError
from onpolicy.outputs import rollout_journal
from onpolicy.outputs.directory import RunDirectory
from onpolicy.outputs.metrics import Sink
from onpolicy.outputs.plot import plot_run
from onpolicy.outputs.progress import Progress
from onpolicy.outputs.samples import FailedAttempt, SampleLog
from onpolicy.types import SampleGroup

logger = logging.getLogger(__name__)

Metrics = dict[str, float]


class Journal:
    """The writer of a run's events: into its directory, to the trackers given, and on the console."""

    def __init__(
        self,
        directory: RunDirectory,
        sinks: Sequence[Sink],
        samples: SampleLog,
        progress: Progress,
        first_step: int,
        log_samples_interval: int,
    ):
        self._directory, self._sinks, self._samples = directory, sinks, samples
        self._progress = progress
        self._first_step, self._log_samples_interval = first_step, log_samples_interval

    @classmethod
    @contextmanager
    def opened(
        cls,
        config: TrainConfig,
        directory: RunDirectory,
        decode: Callable[[list[int]], str],
        first_step: int,
        console: Console | None = None,
    ) -> Iterator[Journal]:
        """Open the journal of a run that starts with `first_step`.

        `decode` turns tokens into text, special tokens included. Progress is shown on `console`, or on
        standard output.
        """
        output, num_rollout = config.output, config.rollout.num_rollout
        with directory.opened_sinks(config, first_step) as sinks:
            samples = SampleLog(directory.samples, decode, output.log_samples, first_step)
            with closing(Progress(num_rollout, first_step, console)) as progress:
                interval = output.log_samples_interval
                yield cls(directory, sinks, samples, progress, first_step, interval)

    def on_requests(self, count: int) -> None:
        """Show that `count` responses are about to be sampled."""
        self._progress.on_requests(count)

    def on_response(self, num_done: int, num_tokens: int) -> None:
        """Show that `num_done` of them are complete, the latest with `num_tokens` tokens."""
        self._progress.on_response(num_done, num_tokens)

    def on_rollout(
        self,
        step: int,
        groups: Sequence[SampleGroup],
        failed: Sequence[FailedAttempt],
        weights: str = "",
    ) -> None:
        """Record a rollout that was sampled and scored, and the failed attempts at its episodes.

        `weights`: the digest of the weights that will learn from it, for an asynchronous run's journal
        of rollouts.
        """
        self._write_failed("rollout", step, failed)
        if weights:
            with self._directory.writing():
                record = rollout_journal.record_of(step, weights, groups)
                rollout_journal.add(self._directory.rollouts, record)
        first = next((sample for group in groups for sample in group.samples), None)
        if step == self._first_step and first is not None:
            logger.info("%s", self._samples.describe(first))

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
        self._write_samples(_eval_file(name), step, groups)
        self._write_failed(_eval_file(name), step, failed)
        numbers = "  ".join(f"{k.split('/')[-1]} {v:.4g}" for k, v in metrics.items())
        logger.info("after %d rollouts, %s: %s", step, name or "evaluation", numbers)

    def on_training(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Mark the shown samples before a rollout is trained on, so that the trainer reports on them."""
        if step % self._log_samples_interval == 0:
            for sample in self._samples.shown(groups):
                sample.is_shown = True

    def on_trained(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Record the shown samples after training, failed or not."""
        if step % self._log_samples_interval == 0:
            self._write_samples("rollout", step, groups)

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
        self._directory.record_move(step, move.before, move.after, move.reason)

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of a finished step."""
        self._log(step, metrics)
        self._progress.on_step(step, metrics)

    def on_end(self) -> None:
        """Draw the plot of the finished run."""
        try:
            plot_run(self._directory.metrics_file, self._directory.plots / "training.png")
        except OSError as error:  # no reason to lose a finished run's summary
            logger.warning("the plot could not be written (%s)", error)

    def _log(self, step: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            with self._directory.writing():
                sink.log(step, metrics)

    def _write_samples(self, name: str, step: int, groups: Sequence[SampleGroup]) -> None:
        with self._directory.writing():
            self._samples.write(name, step, groups)

    def _write_failed(self, name: str, step: int, failed: Sequence[FailedAttempt]) -> None:
        with self._directory.writing():
            self._samples.write_failed(name, step, failed)


def _eval_file(name: str) -> str:
    """Return the name of an evaluation set's sample files."""
    return f"eval_{name}" if name else "eval"
