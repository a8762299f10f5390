"""Discrete-event simulation of the gain from a lag; prints a Markdown table.

    python benchmarks/lag_simulation.py --token-seconds 0.02 --response-seconds 0.0003 --train-ratio 0.5
    python benchmarks/lag_simulation.py --measured benchmarks/results/schedules.json

It simulates the schedules of docs/async.md on responses of long-tailed lengths, and no more: engines are
alike, one that is done waits, every token of an engine takes the same time at the same number of
responses in flight, and nothing dies. On one machine both sides share cores; here they do not.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

MEDIAN, LONGEST, SPREAD = 64, 1024, 1.0
"""Tokens of a response: a log-normal's median, its cut, and the standard deviation of the logarithm."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured costs in seconds."""

    token: float
    """The cost of one more token of all responses in flight on an engine."""

    response: float
    """The additional cost of that per response."""

    prefill: float
    """The cost of a token of a prompt."""

    train: float
    """The cost of an optimizer step per token of a rollout."""

    score: float
    """The cost of the old log-probability of a lagging token, where a pass of its own computes it.
    """

    push: float


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of a run. A step has `groups` times `samples` responses, `slots` at once on an engine."""

    groups: int
    samples: int
    engines: int
    slots: int
    lag: int = 0
    steps: int = 40
    prompt: int = 64


@dataclass(slots=True)
class Outcome:
    """The times of a run: seconds, and the busy seconds of each side, engines by their slots."""

    wall: float = 0.0
    tokens: int = 0
    slot_seconds: float = 0.0
    trainer_seconds: float = 0.0
    longest_lag: int = 0


def draw(pieces: Sequence[tuple[int, int]], setting: Setting, costs: Costs) -> tuple[float, float]:
    """Sample (tokens to prefill, tokens to sample) of responses, from one queue, by all engines.

    Return the seconds until the last is there, and the seconds of occupied slots of all engines.
    """
    queue = iter(pieces)
    engines = [_Engine(costs) for _ in range(setting.engines)]
    for _ in range(setting.slots):
        for engine, piece in zip(engines, queue, strict=False):
            engine.take(*piece)
    events = [(engine.next_end(), i) for i, engine in enumerate(engines) if engine.ends]
    heapq.heapify(events)
    last = 0.0
    while events:
        last, i = heapq.heappop(events)
        engine = engines[i]
        engine.finish_first(last)
        if (piece := next(queue, None)) is not None:
            engine.take(*piece)
        if engine.ends:
            heapq.heappush(events, (engine.next_end(), i))
    return last, sum(engine.occupied for engine in engines)


@dataclass(slots=True)
class _Engine:
    """An engine that advances all its responses by a token at a time."""

    costs: Costs
    now: float = 0.0
    done: float = 0.0
    occupied: float = 0.0
    ends: list[float] = field(default_factory=list)

    def take(self, prefill: int, tokens: int) -> None:
        seconds = prefill * self.costs.prefill
        self.now += seconds
        self.occupied += seconds * (len(self.ends) + 1)
        heapq.heappush(self.ends, self.done + tokens)

    def next_end(self) -> float:
        return self.now + (self.ends[0] - self.done) * self._token_seconds()

    def finish_first(self, at: float) -> None:
        self.occupied += (at - self.now) * len(self.ends)
        self.now, self.done = at, heapq.heappop(self.ends)

    def _token_seconds(self) -> float:
        return self.costs.token + self.costs.response * len(self.ends)


def lengths(seed: int = 0) -> Iterator[int]:
    """Yield lengths of responses, in the order of the prompts: the same under every schedule."""
    chance = random.Random(seed)
    while True:
        yield max(1, min(LONGEST, round(MEDIAN * math.exp(SPREAD * chance.gauss(0, 1)))))


def simulate(setting: Setting, costs: Costs, seed: int = 0) -> Outcome:
    """Simulate a run: each step trains on responses that were sampled under the schedule's version."""
    outcome, source = Outcome(), lengths(seed)
    count = setting.groups * setting.samples
    batches: list[tuple[int, int]] = []  # (version, sampled tokens)
    for version in range(setting.steps):
        drawn = 0.0
        while len(batches) <= min(version + setting.lag, setting.steps - 1):
            pieces = [(setting.prompt, next(source)) for _ in range(count)]
            seconds, occupied = draw(pieces, setting, costs)
            outcome.slot_seconds += occupied
            batches.append((version, sum(tokens for _, tokens in pieces)))
            if len(batches) == 1 or setting.lag == 0:  # the step's own: nobody trains meanwhile
                outcome.wall += seconds
            else:
                drawn += seconds
        drawn_under, sampled = batches[version]
        lag = version - drawn_under
        trained = (sampled + count * setting.prompt) * (costs.train + (costs.score if lag else 0.0))
        outcome.tokens += sampled
        outcome.trainer_seconds += trained
        outcome.longest_lag = max(outcome.longest_lag, lag)
        outcome.wall += max(drawn, trained) + costs.push
    return outcome


SCHEDULES = {"lag 0": {}, "lag 1": {"lag": 1}}


TITLES = (
    "engines", "schedule", "seconds a step", "speed", "slots in use", "trainer busy", "lag up to",
)  # fmt: skip


def train_cost(setting: Setting, costs: Costs, ratio: float) -> float:
    """Return the seconds to train on a token, so that training takes `ratio` of the sampling time."""
    source = lengths()
    pieces = [(setting.prompt, next(source)) for _ in range(setting.groups * setting.samples)]
    seconds, _ = draw(pieces, setting, costs)
    return ratio * seconds / sum(prefill + tokens for prefill, tokens in pieces)


def measured_costs(measured: dict[str, Any], engines: int = 1) -> Costs:
    """Return the costs in a result of `onpolicy bench loop --longest-response`, from its lag 0,
    where the one engine and the trainer work in turns.

    Sampling takes `token` for every token of the longest response and `response` for every token of
    all: least squares over the steps, neither below 0. Prompts are part of that. The trainer grows
    with the engines, so that it takes as long for their samples as the measured one for those of one
    engine, and computes no old log-probabilities.
    """
    steps = measured["schedules"]["lag 0"]
    token, response = fit(steps["longest_responses"], steps["tokens"], steps["drawing_seconds"])
    samples = measured["num_prompts"] * measured["n_samples_per_prompt"]
    prompts = len(steps["tokens"]) * samples * measured["prompt_len"]
    return Costs(
        token=token,
        response=response,
        prefill=0.0,
        train=sum(steps["train_seconds"]) / (sum(steps["tokens"]) + prompts) / engines,
        score=0.0,
        push=fmean(steps["push_seconds"]),
    )


def fit(a: Sequence[float], b: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return x >= 0 and z >= 0 for which the squares of a x + b z - y have the smallest sum."""

    def dot(u: Sequence[float], v: Sequence[float]) -> float:
        return sum(p * q for p, q in zip(u, v, strict=True))

    aa, ab, bb, ay, by = dot(a, a), dot(a, b), dot(b, b), dot(a, y), dot(b, y)
    if determinant := aa * bb - ab * ab:
        x, z = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
        if x >= 0 and z >= 0:
            return x, z
    only_a, only_b = (ay / aa, 0.0), (0.0, by / bb)
    return only_a if ay * ay / aa >= by * by / bb else only_b


def measured_setting(measured: dict[str, Any], engines: int) -> Setting:
    """Return the setting that was measured with one engine, scaled to `engines` with as many times
    the prompts."""
    groups, samples = measured["num_prompts"], measured["n_samples_per_prompt"]
    return Setting(
        groups=groups * engines, samples=samples, engines=engines, slots=groups * samples,
        prompt=measured["prompt_len"],
    )  # fmt: skip


def given_costs(given: argparse.Namespace, setting: Setting) -> Costs:
    costs = Costs(
        token=given.token_seconds, response=given.response_seconds, prefill=given.prefill_seconds,
        train=0.0, score=0.0, push=given.push_seconds,
    )  # fmt: skip
    train = train_cost(setting, costs, given.train_ratio)
    return replace(costs, train=train, score=given.score_ratio * train)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--token-seconds", type=float, default=0.02)
    parser.add_argument("--response-seconds", type=float, default=0.0003)
    parser.add_argument("--prefill-seconds", type=float, default=0.00002, help="of a token")
    parser.add_argument("--push-seconds", type=float, default=1.0)
    parser.add_argument(
        "--train-ratio", type=float, default=0.5, help="training over drawing at lag 0"
    )
    parser.add_argument(
        "--score-ratio",
        type=float,
        default=0.0,
        help="scoring stale samples over training; a third where their loss cannot do it",
    )
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--groups-per-engine", type=int, default=4)
    parser.add_argument(
        "--measured", type=Path, metavar="JSON",
        help="costs and sizes from this result of `onpolicy bench loop --longest-response` instead",
    )  # fmt: skip
    given = parser.parse_args()
    print(f"| {' | '.join(TITLES)} |")
    print("|---|---|---|---|---|---|---|")
    for engines in given.engines:
        if given.measured:
            measured = json.loads(given.measured.read_text())
            base, costs = measured_setting(measured, engines), measured_costs(measured, engines)
        else:
            groups = given.groups_per_engine * engines
            base = Setting(groups=groups, samples=8, engines=engines, slots=32)
            costs = given_costs(given, base)
        print_rows(base, costs)


def print_rows(base: Setting, costs: Costs) -> None:
    """Print a row of the table for each schedule."""
    first = 0.0
    for name, values in SCHEDULES.items():
        found = simulate(replace(base, **values), costs)
        speed = found.tokens / found.wall
        first = first or speed
        slots = found.slot_seconds / (found.wall * base.engines * base.slots)
        print(
            f"| {base.engines} | {name} | {found.wall / base.steps:.1f} | {speed / first:.2f} | "
            f"{slots:.0%} | {found.trainer_seconds / found.wall:.0%} | {found.longest_lag} |"
        )


if __name__ == "__main__":
    main()
