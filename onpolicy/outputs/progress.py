"""Progress display of a run: a bar, its latest numbers, and a table at the end."""

import logging
from collections import deque
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from onpolicy.outputs.console import duration, elapsed
from onpolicy.outputs.totals import RunSummary, parity_of

RECENT = 20
"""Rollouts whose mean time predicts the end of the run: responses grow while it learns."""

SILENCE = 60.0
"""Seconds after which a line reports the progress of sampling, where there is no bar."""

PHASE_SILENCE = 15.0
"""Seconds of silence in a phase of a command that ends within minutes."""

logger = logging.getLogger(__name__)


class Progress:
    """A bar over rollouts; without a terminal, one line per rollout. `console`: standard output."""

    def __init__(self, total: int, done: int, console: Console | None = None):
        self._console = console or Console(soft_wrap=True)
        self._bar = RichProgress(
            TextColumn("rollout"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[times]}"),
            TextColumn("{task.fields[latest]}"),
            TextColumn("[dim]{task.fields[now]}[/dim]"),
            console=self._console,
            expand=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(
            "", total=total, completed=done, times="", latest="", now=""
        )
        self._total, self._asked = total, 0
        self._finished = deque([elapsed()], maxlen=RECENT + 1)
        self._spoken = elapsed()
        self._bar.start()

    def on_requests(self, count: int) -> None:
        """Begin to sample `count` responses."""
        self._asked = count

    def on_response(self, num_done: int, num_tokens: int) -> None:
        """Show that a response has arrived."""
        self._bar.update(self._task, now=f"{num_done}/{self._asked} sampled")
        if elapsed() - self._spoken > SILENCE:
            self._say(f"{num_done} of {self._asked} sampled  {duration(elapsed())} elapsed")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that a rollout has been trained on."""
        self._finished.append(elapsed())
        pace = (self._finished[-1] - self._finished[0]) / (len(self._finished) - 1)
        spent, left = duration(elapsed()), duration(pace * (self._total - step - 1))
        mean = metrics.get("rollout/raw_reward")
        reward = "no reward" if mean is None else f"reward {mean:.3f}"
        compared, mismatched = parity_of(metrics)
        speed = f"{metrics['perf/rollout_tokens_per_second']:.0f} tok/s"
        distinct = metrics.get("train/distinct_tokens_share")
        shared = "" if distinct is None else f"distinct tokens {distinct:.0%}"
        self._bar.update(
            self._task,
            advance=1,
            times=f"{spent}<{left}",
            latest=f"{reward} mismatched {mismatched}/{compared}",
            now=f"{speed} {shared}".rstrip(),
        )
        parts = (
            f"rollout {step + 1}/{self._total}", reward, f"mismatched {mismatched} of {compared}",
            speed, shared, f"{spent} elapsed, {left} left",
        )  # fmt: skip
        self._say("  ".join(filter(None, parts)))

    def _say(self, line: str) -> None:
        """Print a line where there is no bar."""
        self._spoken = elapsed()
        if not self._console.is_terminal:
            self._console.print(line, highlight=False)

    def close(self) -> None:
        self._bar.stop()


class Phases:
    """The phase of a command, on standard error: a bar, or lines without a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True, soft_wrap=True)
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._has_bar, self._spoken = console.is_terminal, elapsed()
        self._what, self._total, self._task = "", 0, TaskID(0)
        self._bar.start()

    def begin(self, what: str, total: int = 0) -> None:
        """Begin a new phase, of `total` steps if they can be counted."""
        if self._total:
            self._bar.remove_task(self._task)
        self._what, self._total, self._spoken = what, total, elapsed()
        logger.info("%s", what)
        if total:
            self._task = self._bar.add_task(what, total=total)

    def advance(self, done: int) -> None:
        """Show that so many steps of the phase are done."""
        if not self._total:
            return
        self._bar.update(self._task, completed=done)
        if elapsed() - self._spoken > PHASE_SILENCE and not self._has_bar:
            self._spoken = elapsed()
            logger.info("%s: %d of %d", self._what, done, self._total)

    def close(self) -> None:
        self._bar.stop()


def print_summary(summary: RunSummary) -> None:
    """Print the table at the end of a run."""
    table = Table(title="onpolicy run", show_header=False)
    totals = summary.totals
    table.add_row("rollouts", str(summary.rollouts))
    table.add_row("reward, first to last", f"{totals.first_reward:.3f} to {totals.last_reward:.3f}")
    table.add_row("tokens compared bit by bit", f"{totals.num_compared_tokens:,}")
    table.add_row("tokens mismatched", f"{totals.num_mismatched_tokens:,}")
    if totals.num_unscored:
        table.add_row("samples that could not be scored", f"{totals.num_unscored:,}")
    if totals.num_repeats:
        table.add_row("calls of reward rules repeated", f"{totals.num_repeats:,}")
    table.add_row("run hash", summary.run_hash)
    table.add_row("metrics", f"{summary.run_dir}/metrics.jsonl")
    table.add_row("curves", f"onpolicy report {summary.run_dir}")
    Console().print(table)
