"""HTML page with the curves of several runs over each other. It opens without a network."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from onpolicy.outputs.meanings import BY_THE_CLOCK, meaning
from onpolicy.report.runs import Curve, LoggedRun, RunGroup, group_runs, median_curve


@dataclass(frozen=True)
class Panel:
    """A panel: the metrics that share its axis, as names or patterns."""

    title: str
    metrics: tuple[str, ...]


PANELS = (
    Panel("Reward", ("rollout/raw_reward",)),
    Panel("Evaluation reward", ("eval/avg@*", "eval/*/avg@*")),
    Panel("Evaluation prompts with a rewarded sample (share)", ("eval/pass@*", "eval/*/pass@*")),
    Panel("k3 between the engines", ("mismatch/k3", "train/k3_kl")),
    Panel("Effective sample size", ("mismatch/ess*",)),
    Panel(
        "Log-probability difference",
        ("mismatch/log_ppl_abs_diff", "train/train_rollout_logprob_abs_diff"),
    ),
    Panel("Mismatched tokens", ("parity/num_mismatched_tokens", "probe/num_mismatched_tokens")),
    Panel("Lag of the tokens (pushes)", ("lag/mean",)),
    Panel("k3 by lag", ("lag/*/k3",)),
    Panel("Effective sample size by lag", ("lag/*/ess",)),
    Panel("Weights above their bound by lag (share)", ("lag/*/clip_share",)),
    Panel("Rejected tokens by lag (share)", ("lag/*/rejected_share",)),
    Panel("Gradient norm", ("train/grad_norm",)),
    Panel("Response length (tokens)", ("rollout/response_length",)),
    Panel("Truncated responses", ("rollout/truncated_ratio",)),
    Panel("Turns and trajectories of an episode", ("episodes/num_turns", "episodes/num_trajectories")),
    Panel("Tokens before answers that were cached (share)", ("rollout/prefix_cache_hit_rate",)),
    Panel("Learning rate", ("train/lr",)),
    Panel("Learning-rate decay", ("lr_decay/scale",)),
    Panel("Lambda", ("dc/lambda",)),
    Panel("Tokens that corrections touched (share)", ("correction/*_fraction*",)),
    Panel("Governor's rung", ("governor/rung",)),
    Panel("Values and returns", ("critic/vpred_mean", "critic/return_mean")),
    Panel("Variance of the returns that the critic knew (share)", ("critic/vf_explained_var",)),
    Panel("Entropy (nats)", ("train/entropy",)),
    Panel("Loss", ("train/loss",)),
    Panel("Distinct tokens of the micro-batches (share)", ("train/distinct_tokens_share",)),
    Panel("Clipped ratios (share)", ("train/pg_clipfrac",)),
    Panel("KL to the reference model", ("train/kl_loss",)),
    Panel(
        "Tokens per second", ("perf/rollout_tokens_per_second", "perf/train_tokens_per_second")
    ),
)  # fmt: skip
"""The panels in the page's order. A panel that no run has data for is left out."""


NO_LINKS: Mapping[str, str] = MappingProxyType({})


def render(runs: Sequence[LoggedRun], links: Mapping[str, str] = NO_LINKS) -> str:
    """Return the page as HTML; `links`: the page of each run's episodes, by the run's name."""
    data = page_data(runs, links)
    return page_of("page.html", ["page.css"], ["elements.js", "page.js"], data)


def page_of(template: str, styles: Sequence[str], scripts: Sequence[str], data: Any) -> str:
    """Return a page from this folder's files: the template with styles, scripts and data in it."""
    page = _part(template)
    page = page.replace("__STYLE__", "".join(map(_part, styles)), 1)
    page = page.replace("__SCRIPT__", "".join(map(_part, scripts)), 1)
    return page.replace("__DATA__", _script_safe(data), 1)


def _part(name: str) -> str:
    return files("onpolicy.report").joinpath(name).read_text(encoding="utf-8")


def page_data(runs: Sequence[LoggedRun], links: Mapping[str, str] = NO_LINKS) -> dict[str, Any]:
    """Return everything that the page shows, as JSON values."""
    groups = group_runs(runs)
    panels = [_panel(panel, runs, groups) for panel in PANELS]
    return {
        "groups": [{"name": group.name, "runs": group.runs} for group in groups],
        "runs": [
            {**_run(run), "same_as": same, "episodes": links.get(run.name)}
            for run, same in zip(runs, _same_as(runs), strict=True)
        ],
        "panels": [panel for panel in panels if panel["metrics"]],
    }


def _run(run: LoggedRun) -> dict[str, Any]:
    """Return a row of the table."""
    rewards = list(run.curves.get("rollout/raw_reward", {}).values())
    return {
        "name": run.name,
        "seed": (run.config or {}).get("seed"),
        "rollouts": len(rewards),
        "first_reward": _json_value(rewards[0]) if rewards else None,
        "last_reward": _json_value(rewards[-1]) if rewards else None,
        "compared": _total(run, "parity/num_compared_tokens"),
        "mismatched": _total(run, "parity/num_mismatched_tokens"),
        "moves": [vars(move) for move in run.moves],
    }


def _same_as(runs: Sequence[LoggedRun]) -> list[int | None]:
    """Return, for each run, the first earlier run with equal values, but for clock-dependent ones."""
    values = [
        json.dumps({k: run.curves[k] for k in sorted(run.curves) if not k.startswith(BY_THE_CLOCK)})
        for run in runs
    ]
    firsts = [values.index(value) for value in values]
    return [first if first < i and values[i] != "{}" else None for i, first in enumerate(firsts)]


def _total(run: LoggedRun, metric: str) -> int | None:
    """Return the sum over the run; None if it never logged the metric."""
    curve = run.curves.get(metric)
    return None if curve is None else int(sum(x for x in curve.values() if math.isfinite(x)))


def _panel(panel: Panel, runs: Sequence[LoggedRun], groups: Sequence[RunGroup]) -> dict[str, Any]:
    logged = dict.fromkeys(name for run in runs for name in run.curves)
    names = [
        name for pattern in panel.metrics for name in sorted(logged) if fnmatchcase(name, pattern)
    ]
    return {"title": panel.title, "metrics": [_metric(name, runs, groups) for name in names]}


def _metric(name: str, runs: Sequence[LoggedRun], groups: Sequence[RunGroup]) -> dict[str, Any]:
    """Return one metric's curves by run, and the medians by group of several runs."""
    curves = {i: run.curves[name] for i, run in enumerate(runs) if name in run.curves}
    medians = {
        i: median_curve(curves[run] for run in group.runs if run in curves)
        for i, group in enumerate(groups)
        if len(group.runs) > 1
    }
    return {
        "name": name,
        "meaning": meaning(name),
        "runs": {i: _points(curve) for i, curve in curves.items()},
        "medians": {i: _points(curve) for i, curve in medians.items() if curve},
    }


def _points(curve: Curve) -> list[list[Any]]:
    return [list(curve), [_json_value(value) for value in curve.values()]]


def _json_value(value: float) -> float | str:
    """Return a value with six digits, enough for a picture; NaN and infinity as text for JSON."""
    if not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _script_safe(value: Any) -> str:
    """Return JSON that cannot end the <script> around it. The page never makes HTML of it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
