"""The runs of docs/collapse.md, one record each; a recorded run is not repeated.

    python examples/collapse/study.py [--only 'int3-*' ...] [--list]

Runs one after the other, in the order of the patterns, and can be ended and called again at any time.
Two calls with different patterns, side by side, take half the time on 2 cores, once there is a model.
A record is results/NAME.json: the command and the curves. Run directories are in WORK_DIR
(runs/collapse).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from records import read_curves

from onpolicy.system import files

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from driver import drive, surroundings

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
WORK = Path(os.environ.get("WORK_DIR", HERE.parents[1] / "runs" / "collapse"))

SEEDS = range(5)
FORMATS = ("int3", "int4", "fp8_e4m3")
LONG = 400
"""Rollouts of the runs in which a small mismatch gets more time."""

CORRECTIONS = (
    "tis_token", "mis_token", "tis_sequence", "mis_sequence", "geometric_normalized",
    "dc_0.0037", "dc_0.03", "dc_0.1", "length_decay", "bypass", "governor",
)  # fmt: skip

RECENT = (
    "centered", "centered_tis", "geo_rs_0.01", "vcpo", "centered_top8", "topr", "kpop",
)  # fmt: skip
"""Corrections of 2026, each by itself or with its token weights."""

ADVANTAGES = "examples/collapse/advantages.py"
AS_ADVANTAGES = ("--rm-type=", "--group-rm", "--rewards", "exact=0", f"{ADVANTAGES}:compared")
"""Flags of a run whose rewards are advantages, without the advantage of unsolvable prompts."""

CHANGES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "": ({}, ()),
    "lr_1e-3": ({}, ("--lr", "1e-3")),
    "lr_2e-3": ({}, ("--lr", "2e-3")),
    "two_steps": ({}, ("--global-batch-size", "48")),
    "lag_1": ({}, ("--rollout-lag", "1")),
    "lag_4": ({}, ("--rollout-lag", "4")),
    "lag_4_half": ({}, ("--rollout-lag", "4", "--rollout-batch-size", "24")),
    "lag_4_twice": ({}, ("--rollout-lag", "4", "--rollout-batch-size", "96")),
    "lag_2": ({}, ("--rollout-lag", "2", "--no-correct-lag")),
    "lag_2_weighed": ({}, ("--rollout-lag", "2", "--use-tis")),
    "lag_2_bypass": ({}, ("--rollout-lag", "2")),
    "64_digits": ({"DIGITS": "64"}, ()),
    "8_experts": ({"EXPERTS": "8"}, ()),
    "8_experts_replayed": ({"EXPERTS": "8"}, ("--use-rollout-routing-replay",)),
    "model_1": ({"MODEL": "1"}, ()),
    "model_2": ({"MODEL": "2"}, ()),
    "kv_e4m3": ({}, ("--sglang-kv-cache-dtype", "fp8_e4m3")),
    "kv_e5m2": ({}, ("--sglang-kv-cache-dtype", "fp8_e5m2")),
    "b_-0.5": ({}, (*AS_ADVANTAGES, f"{ADVANTAGES}:unsolvable=-0.5")),
    "b_0": ({}, (*AS_ADVANTAGES, f"{ADVANTAGES}:unsolvable=0")),
    "b_0.5": ({}, (*AS_ADVANTAGES, f"{ADVANTAGES}:unsolvable=0.5")),
}
"""Changes of the setting, (variables, flags) of train.sh: none; twice and four times the learning rate;
two optimizer steps a rollout; stale weights, corrected as the arm says, with half and with twice the
prompts too, as they are, weighed, and in bypass as is the default; longer answers; a mixture of experts;
two other models to begin with; a cache of keys and values in FP8; the advantage that unsolvable prompts
have where rewards are advantages."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: a file in arms/, the variables of train.sh, and what of its setting is changed."""

    arm: str
    seed: int
    weight_format: str = ""
    rollouts: int = 160
    estimator: str = "reinforce_plus_plus"
    change: str = ""

    @property
    def name(self) -> str:
        """Example: int4-nothing-grpo-400-0"""
        estimator = "" if self.estimator == "reinforce_plus_plus" else self.estimator
        rollouts = "" if self.rollouts == 160 else str(self.rollouts)
        parts = [self.weight_format, self.arm, estimator, rollouts, self.change, str(self.seed)]
        return "-".join(part for part in parts if part)

    @property
    def variables(self) -> dict[str, str]:
        values = {"SEED": str(self.seed), "NUM_ROLLOUT": str(self.rollouts)}
        values |= {"ESTIMATOR": self.estimator, **CHANGES[self.change][0]}
        return values | ({"FORMAT": self.weight_format} if self.weight_format else {})

    @property
    def arguments(self) -> tuple[str, ...]:
        """Returns the arguments of train.sh."""
        return (self.arm, *CHANGES[self.change][1])


def plan() -> Iterator[Run]:
    """Every run of the protocol, and of its later parts, in which the setting is changed."""
    for seed in SEEDS:
        yield Run(arm="aligned", seed=seed)
        for weight_format in FORMATS:
            for arm in ("nothing", *CORRECTIONS):
                yield Run(arm=arm, seed=seed, weight_format=weight_format)
        for arm, weight_format in (("aligned", ""), ("nothing", "int3"), ("nothing", "int4")):
            yield Run(arm=arm, seed=seed, weight_format=weight_format, estimator="grpo")
        for arm, weight_format in (("aligned", ""), ("nothing", "int4"), ("nothing", "fp8_e4m3")):
            yield Run(arm=arm, seed=seed, weight_format=weight_format, rollouts=LONG)
    for seed in SEEDS:
        for arm in ("aligned", "nothing"):
            yield changed(arm, seed, "lr_1e-3", "grpo")
        for arm in ("aligned", "nothing", "tis_token"):
            yield changed(arm, seed, "two_steps")
        yield changed("aligned", seed, "lag_2")
    for seed in SEEDS:
        for arm in ("aligned", "nothing"):
            yield changed(arm, seed, "lr_2e-3", "grpo")
        yield changed("aligned", seed, "lag_2_weighed")
        yield changed("aligned", seed, "lag_2_bypass")
        for arm in ("aligned", "nothing", "tis_token", "tis_sequence"):
            yield changed(arm, seed, "64_digits")
        for arm in ("aligned", "nothing", "tis_token"):
            yield changed(arm, seed, "8_experts")
        yield changed("nothing", seed, "8_experts_replayed")
    for seed in SEEDS:
        yield Run(arm="aligned_rounded", seed=seed, weight_format="int3")
    for seed in SEEDS:
        yield Run(arm="dc_0.015", seed=seed, weight_format="int3", estimator="grpo")
        for change in ("model_1", "model_2"):
            for arm in ("aligned", "nothing", "tis_token"):
                yield changed(arm, seed, change)
        for arm in ("tis_token", "tis_sequence"):
            yield Run(arm=arm, seed=seed, weight_format="int3", rollouts=LONG)
    for seed in SEEDS:
        yield Run(arm="nothing", seed=seed, weight_format="bf16")
        for change in ("kv_e4m3", "kv_e5m2"):
            yield Run(arm="nothing", seed=seed, weight_format="bf16", change=change)
        yield Run(arm="tis_token", seed=seed, weight_format="bf16", change="kv_e4m3")
    for seed in SEEDS:
        yield Run(arm="dc_0.015_centered", seed=seed, weight_format="int3", estimator="grpo")
        yield Run(arm="geometric", seed=seed, weight_format="int3")
    for seed in SEEDS:
        yield Run(arm="geo_rs", seed=seed, weight_format="int3")
    for seed in SEEDS:
        for arm, change in product(("aligned", "nothing"), ("b_-0.5", "b_0", "b_0.5")):
            yield changed(arm, seed, change, "reinforce")
        for change in ("lag_2", "lag_2_bypass"):
            yield changed("aligned", seed, change, "grpo")
    yield from verdict()


def verdict() -> Iterator[Run]:
    """The runs of docs/collapse.md's table of 2026's corrections, most worth first."""
    for seed in SEEDS:
        for arm in RECENT:
            yield Run(arm=arm, seed=seed, weight_format="int3")
        for arm in ("nothing", "tis_token"):
            yield Run(arm=arm, seed=seed, weight_format="int3", estimator="otb")
    stale = ("stale", "tis_token", "geo_rs", "geo_rs_0.01")
    for seed in SEEDS:
        for change in ("lag_4", "lag_1"):
            for arm in ("tis_token", "geo_rs", "geo_rs_0.01"):
                yield changed(arm, seed, change)
            for arm in (*stale, "vcpo", "centered_tis"):
                yield Run(arm=arm, seed=seed, weight_format="bf16", change=change)
            for arm in stale:
                yield with_grpo(arm, seed, change)
    controls = (
        ("half_at_random", "lag_4"), ("stale", "lag_4_half"), ("tis_token", "lag_4_half"),
        ("geo_rs", "lag_4_twice"),
    )  # fmt: skip
    for seed, (arm, change) in product(SEEDS, controls):
        yield with_grpo(arm, seed, change)


def with_grpo(arm: str, seed: int, change: str) -> Run:
    """A run with GRPO on a stock bfloat16 engine, in a changed setting."""
    return Run(arm=arm, seed=seed, weight_format="bf16", estimator="grpo", change=change)


def changed(arm: str, seed: int, change: str, estimator: str = "reinforce_plus_plus") -> Run:
    """A run in a changed setting, on an engine of 3 bits unless it is aligned."""
    weight_format = "" if arm == "aligned" else "int3"
    return Run(arm=arm, seed=seed, weight_format=weight_format, estimator=estimator, change=change)


def record_of(run: Run) -> Path:
    return RESULTS / f"{run.name}.json"


def carry_out(run: Run) -> None:
    """Run it, and write its record. Raises CalledProcessError if the run fails."""
    directory, start = WORK / run.name, time.time()
    about = surroundings(start)
    environment = {**os.environ, **run.variables, "WORK_DIR": str(WORK), "RUN_DIR": str(directory)}
    subprocess.run([HERE / "train.sh", *run.arguments], env=environment, check=True)
    write_record(run, directory, about, time.time() - start)


def write_record(run: Run, directory: Path, about: dict[str, str], seconds: float) -> None:
    curves = read_curves(directory)
    if len(curves["reward"]) != run.rollouts:
        raise ValueError(f"{directory}: {len(curves['reward'])} rollouts, not {run.rollouts}.")
    shown = " ".join(f"{name}={value}" for name, value in run.variables.items())
    record = {
        "command": f"{shown} examples/collapse/train.sh {' '.join(run.arguments)}",
        **about,
        "seconds": round(seconds),
        "curves": curves,
    }
    files.write(record_of(run), as_json(record))


def as_json(record: dict[str, object]) -> str:
    """JSON, a curve on a line."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
    curves = record["curves"]
    assert isinstance(curves, dict)
    each = [f"    {json.dumps(name)}: {json.dumps(values)}" for name, values in curves.items()]
    lines[-1] = '  "curves": {\n' + ",\n".join(each) + "\n  }"
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    drive(str(__doc__).partition("\n")[0], plan(), lambda run: record_of(run).exists(), carry_out)
