"""What a person sees while a run goes on: a bar, its latest numbers, and a table at the end."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from onpolicy.types import RunSummary

_LINE = "reward {reward:.3f}  mismatched {mismatched:.0f} of {compared:.0f}  {speed:.0f} tok/s"


class Progress:
    """A bar over rollouts; without a terminal, one line per rollout."""

    def __init__(self, total: int, done: int):
        self._console = Console()
        self._bar = RichProgress(
            TextColumn("rollout"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[latest]}"),
            TextColumn("{task.fields[sampling]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done, latest="", sampling="")
        self._total = total
        self._bar.start()

    def on_response(self, num_done: int, num_tokens: int) -> None:
        """A response has arrived."""
        self._bar.update(self._task, sampling=f"[dim]{num_done} sampled[/dim]")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A rollout has been trained on."""
        latest = _LINE.format(
            reward=metrics["rollout/raw_reward"],
            mismatched=metrics.get("parity/num_mismatched_tokens", 0),
            compared=metrics.get("parity/num_compared_tokens", 0),
            speed=metrics["perf/rollout_tokens_per_second"],
        )
        self._bar.update(self._task, advance=1, latest=latest, sampling="")
        if not self._console.is_terminal:
            self._console.print(f"rollout {step + 1}/{self._total}  {latest}", highlight=False)

    def close(self) -> None:
        self._bar.stop()


def print_summary(summary: RunSummary) -> None:
    """The table at the end of a run."""
    table = Table(title="onpolicy run", show_header=False)
    totals = summary.totals
    table.add_row("rollouts", str(summary.rollouts))
    table.add_row("reward, first to last", f"{totals.first_reward:.3f} to {totals.last_reward:.3f}")
    table.add_row("tokens compared bit by bit", f"{totals.num_compared_tokens:,}")
    table.add_row("tokens mismatched", f"{totals.num_mismatched_tokens:,}")
    table.add_row("run hash", summary.run_hash)
    table.add_row("metrics", f"{summary.run_dir}/metrics.jsonl")
    table.add_row("plot", f"{summary.run_dir}/plots/training.png")
    Console().print(table)
