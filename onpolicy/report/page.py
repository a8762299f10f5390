"""HTML page with the curves of several runs over each other. It opens without a network.

Its data are each run's configuration, curves and governor's moves. Runs that differ only in their
seed form a group, whose curve is their median.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from itertools import accumulate, takewhile
from pathlib import Path, PurePath
from typing import Any

from onpolicy.config.settings import DECIDE_NO_RESULT
from onpolicy.errors import ConfigError
from onpolicy.outputs.meanings import BY_THE_CLOCK, meaning
from onpolicy.system.files import read_json_object
from onpolicy.system.json_values import number as number_of


def render(runs: Sequence[LoggedRun], links: Mapping[str, str]) -> str:
    """Return the page as HTML; `links`: the page of each run's episodes, by the run's name."""
    data = page_data(runs, links)
    return page_of("report", ["page.css"], ["elements.js", "panels.js", "page.js"], data)


def page_of(
    name: str, styles: Sequence[str], scripts: Sequence[str], data: Any, connect: str = ""
) -> str:
    """Return a page from this folder's files: page.html with the body of `name`, styles, scripts and
    data in it. connect: what its policy adds, for a page that asks its server."""
    parts = {
        "CONNECT": connect,
        "NAME": name,
        "STYLE": "".join(map(_part, styles)),
        "BODY": _part(f"{name}.html"),
        "SCRIPT": "".join(map(_part, scripts)),
        "DATA": _script_safe(data),
    }
    return re.sub("__([A-Z]+)__", lambda found: parts[found[1]], _part("page.html"))


def _part(name: str) -> str:
    return files("onpolicy.report").joinpath(name).read_text(encoding="utf-8")


def page_data(runs: Sequence[LoggedRun], links: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return everything that the page shows, as JSON values."""
    groups = group_runs(runs)
    panels = [_panel(title, metrics, runs, groups) for title, metrics in PANELS.items()]
    return {
        "groups": [
            {"name": g.name, "runs": g.runs, "places": _places([runs[i] for i in g.runs])}
            for g in groups
        ],
        "differences": _differences([runs[group.runs[0]] for group in groups]),
        "runs": [
            {**_run(run), "same_as": same, "episodes": (links or {}).get(run.name)}
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
        "moves": run.moves,
        "places": _places([run]),
    }


def _places(runs: Sequence[LoggedRun]) -> dict[str, list[list[Any]]]:
    """Return where each step lies on the other axes: the sum of what earlier steps add to them, in the
    median of the runs. So no curve goes back where a slow run ends before a fast one."""
    steps = sorted({step for run in runs for curve in run.curves.values() for step in curve})
    found = {}
    for axis, metrics in AXES.items():
        factors = [[run.curves.get(name, {}) for name in metrics] for run in runs]
        added = median_curve(
            {
                step: math.prod(curve[step] for curve in all_of)
                for step in set(all_of[0]).intersection(*all_of)
            }
            for all_of in factors
        )
        if added:
            places = accumulate((added.get(step, 0) for step in steps), initial=0.0)
            found[axis] = _points(dict(zip(steps, places, strict=False)))
    return found


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


def _panel(
    title: str, metrics: Sequence[str], runs: Sequence[LoggedRun], groups: Sequence[RunGroup]
) -> dict[str, Any]:
    logged = sorted({name for run in runs for name in run.curves})
    names = [name for pattern in metrics for name in logged if fnmatchcase(name, pattern)]
    return {"title": title, "metrics": [_metric(name, runs, groups) for name in names]}


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


PANELS: dict[str, tuple[str, ...]] = {
    "Reward": ("rollout/raw_reward",),
    "Parts of the reward": ("rollout/reward/*",),
    "Evaluation reward": ("eval/avg@*", "eval/*/avg@*"),
    "Evaluation prompts with a rewarded sample (share)": ("eval/pass@*", "eval/*/pass@*"),
    "k3 between the engines": ("mismatch/k3", "train/k3_kl"),
    "Effective sample size": ("mismatch/ess*",),
    "Log-probability difference": ("mismatch/log_ppl_abs_diff", "train/train_rollout_logprob_abs_diff"),
    "Mismatched tokens": ("parity/num_mismatched_tokens", "probe/num_mismatched_tokens"),
    "Lag of the tokens (pushes)": ("lag/mean",),
    "k3 by lag": ("lag/*/k3",),
    "Effective sample size by lag": ("lag/*/ess",),
    "Weights above their bound by lag (share)": ("lag/*/clip_share",),
    "Rejected tokens by lag (share)": ("lag/*/rejected_share",),
    "Gradient norm": ("train/grad_norm",),
    "Response length (tokens)": ("rollout/response_length",),
    "Truncated responses": ("rollout/truncated_ratio",),
    "Turns and trajectories of an episode": ("episodes/num_turns", "episodes/num_trajectories"),
    "Tokens before answers that were cached (share)": ("rollout/prefix_cache_hit_rate",),
    "Learning rate": ("train/lr",),
    "Learning-rate decay": ("lr_decay/scale",),
    "Lambda": ("dc/lambda",),
    "Tokens that corrections touched (share)": ("correction/*_fraction*",),
    "Governor's rung": ("governor/rung",),
    "Values and returns": ("critic/vpred_mean", "critic/return_mean"),
    "Variance of the returns that the critic knew (share)": ("critic/vf_explained_var",),
    "Entropy (nats)": ("train/entropy",),
    "Loss": ("train/loss",),
    "Distinct tokens of the micro-batches (share)": ("train/distinct_tokens_share",),
    "Clipped ratios (share)": ("train/pg_clipfrac",),
    "KL to the reference model": ("train/kl_loss",),
    "Tokens per second": ("perf/rollout_tokens_per_second", "perf/train_tokens_per_second"),
}  # fmt: skip
"""The metrics, as names or patterns, that share the axis of a panel, by its title; in the page's order.
A panel that no run has data for is left out."""

AXES = {
    "tokens": ("perf/train_time", "perf/train_tokens_per_second"),
    "seconds": ("perf/step_time",),
}
"""The horizontal axes beside rollouts. A step adds the product of these metrics to them."""

Curve = dict[int, float]
"""The value at each step that has one; NaN and infinity are kept as logged."""


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run, read from its directory."""

    name: str
    """The end of its path, long enough to tell it from the others."""

    config: dict[str, Any] | None
    directory: Path | None = None
    """The run directory; None where a metrics file was given under another name."""

    curves: dict[str, Curve] = field(default_factory=dict)
    moves: list[dict[str, Any]] = field(default_factory=list)
    """The governor's moves: step, source, target and reason of each."""


def read_runs(paths: Sequence[str]) -> list[LoggedRun]:
    """Read every run once, in the order given. Raises ConfigError for one that cannot be read."""
    files = list(dict.fromkeys(_metrics_file(path).resolve() for path in paths))
    places = [file.parent if _is_of_a_directory(file) else file for file in files]
    return [_read_run(file, name) for file, name in zip(files, _names(places), strict=True)]


def _metrics_file(path: str) -> Path:
    file = Path(path) / "metrics.jsonl" if Path(path).is_dir() else Path(path)
    if file.is_file():
        return file
    rule = "has no metrics.jsonl" if Path(path).is_dir() else "no such directory or file"
    raise ConfigError(f"RUN={path}: {rule}. Give the --run-dir of a run, or its metrics.jsonl.")


def _names(places: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ from each other."""
    length = 1
    while len({place.parts[-length:] for place in places}) < len(places):
        length += 1
    return ["/".join(place.parts[-length:]) for place in places]


def _is_of_a_directory(file: Path) -> bool:
    """Return whether the files beside a metrics file belong to the same run."""
    return file.name == "metrics.jsonl"


def _read_run(file: Path, name: str) -> LoggedRun:
    config, moves = file.with_name("config.json"), file.with_name("governor.jsonl")
    beside = _is_of_a_directory(file)
    return LoggedRun(
        name=name,
        directory=file.parent if beside else None,
        config=read_json_object(config, str(config)) if beside and config.exists() else None,
        curves=_read_curves(file),
        moves=_read_moves(moves) if beside and moves.exists() else [],
    )


def _read_curves(file: Path) -> dict[str, Curve]:
    """Return the curves by metric. Several lines for a step, as with an evaluation, are merged."""
    curves: dict[str, Curve] = {}
    for step, record in _records(file):
        for name, said in record.items():
            value = number_of(said)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                curves.setdefault(name, {})[step] = value
    curves.pop("step", None)
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _read_moves(file: Path) -> list[dict[str, Any]]:
    names = {"source": "from", "target": "to", "reason": "reason"}
    return [
        {"step": step} | {name: str(record.get(key, "")) for name, key in names.items()}
        for step, record in _records(file)
    ]


def _records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield step and record of each line; a last line cut short by a kill is left out."""
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return
            raise malformed(file, number, f"not JSON ({error})") from error
        if record is None:
            continue
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise malformed(file, number, 'must be an object with a whole number as "step"')
        yield record["step"], record


def malformed(file: Path, number: int, rule: str) -> ConfigError:
    """Return the error of a line that cannot be read."""
    return ConfigError(f"{file}:{number}: {rule}. Mend or delete the line.")


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Repetitions of one experiment."""

    name: str
    runs: tuple[int, ...]


def group_runs(runs: Sequence[LoggedRun]) -> list[RunGroup]:
    """Return groups in the order of their first runs; a run without configuration is its own."""
    members: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        repeated = (
            json.dumps(_settings(run), sort_keys=True)
            if run.config is not None
            else f"run {position}"
        )
        members.setdefault(repeated, []).append(position)
    names = _group_names([[runs[position] for position in group] for group in members.values()])
    return [
        RunGroup(name=name, runs=tuple(group))
        for name, group in zip(names, members.values(), strict=True)
    ]


def median_curve(curves: Iterable[Curve]) -> Curve:
    """Return the median of the finite values at each step; NaN where there are none."""
    by_step: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in curve.items():
            by_step.setdefault(step, []).extend([value] if math.isfinite(value) else [])
    return {
        step: statistics.median(values) if values else math.nan
        for step, values in sorted(by_step.items())
    }


NOT_THE_EXPERIMENT = DECIDE_NO_RESULT | {"seed"}
"""Settings that may differ inside a group: the seed, and flags that affect no result."""

MOST_VALUES_IN_A_NAME = 3
"""The most differing values in a group's name; with more, groups are named by their directories."""


def _settings(run: LoggedRun) -> dict[str, Any]:
    return {k: v for k, v in (run.config or {}).items() if k not in NOT_THE_EXPERIMENT}


def _group_names(groups: Sequence[Sequence[LoggedRun]]) -> list[str]:
    settings = [_settings(group[0]) for group in groups]
    keys = _differing(settings)
    comparable = all(group[0].config is not None for group in groups)
    if comparable and 0 < len(keys) <= MOST_VALUES_IN_A_NAME:
        by_value = [", ".join(f"{key}={_short(s.get(key))}" for key in keys) for s in settings]
        if len(set(by_value)) == len(groups):
            return by_value
    by_directory = [_common_name([run.name for run in group]) for group in groups]
    if len(set(by_directory)) == len(groups):
        return by_directory
    return [group[0].name for group in groups]


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings that are not the same in all, in their order."""
    known = dict.fromkeys(key for each in settings for key in each)
    return [key for key in known if len({repr(s.get(key)) for s in settings}) > 1]


def _differences(firsts: Sequence[LoggedRun]) -> list[tuple[str, list[str | None]]]:
    """Return the flags in which groups differ, and each group's value; None where nothing is known.
    `firsts`: a run of each group."""
    settings = [_settings(run) for run in firsts]
    return [
        ("--" + key.replace("_", "-"), [json.dumps(s[key]) if key in s else None for s in settings])
        for key in _differing([each for each in settings if each])
    ]


def _short(value: Any) -> str:
    """Return a value for a name: for a path its last part."""
    if isinstance(value, str) and "/" in value:
        return PurePath(value).name
    return value if isinstance(value, str) and value else json.dumps(value)


def _common_name(names: Sequence[str]) -> str:
    """Return the common beginning of the runs' names: ["tis-seed1", "tis-seed2"] -> "tis"."""
    if len(names) == 1:
        return names[0]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    start = "".join(letters[0] for letters in same)
    return re.sub(r"[-_./ ]+(seed|s)?[-_.= ]*$", "", start) or names[0]
