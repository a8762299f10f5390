"""Discrete-event simulation of a step of 16,384 trajectories on many GPUs: where its time goes, and how
near each of the controller's limits is.

    python -m benchmarks.scale_simulation OUT.json OUT.png

Half of the GPUs are engines, half are ranks of the trainer. The controller's costs are the records' of
benchmarks/results; the costs of engines and trainer are ESTIMATES for Qwen3-4B on H100, which nobody has
measured. scale.md says what is left out. Nothing dies here, and no request runs into its timeout.
"""

from __future__ import annotations

import heapq
import json
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.scale_load import GROUPS, PROMPT, SAMPLES, lengths
from onpolicy.rollout.open_groups import FreeGroups, Staleness
from onpolicy.run.drawing import Schedule

RESULTS = Path(__file__).parent / "results"
MICRO_BATCH = 33_280
STEPS, WARM_UP = 8, 3
GPUS, SCHEDULES, STALENESS = (8, 64, 512), ("lag 0", "lag 1", "free"), 2
REQUEST_TIMEOUT, HOST_BYTES = 1800.0, 256 << 30
"""--rollout-request-timeout's default, and the memory of the controller's host, an assumption."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs in seconds, of Qwen3-4B on an H100 by estimate; the controller's are 0 until `measured`."""

    pass_: float = 5.1e-3  # of an engine, which gives each response in flight a token
    row: float = 4.3e-6  # a response in a pass
    cached: float = 5.75e-8  # a token in the cache, in a pass
    prefill: float = 2.5e-5  # a token of a prompt, or of a response that goes on after a push
    cache: int = 410_000  # tokens
    slots: int = 256  # --rollout-max-concurrency's default
    train: float = 5.6e-5  # a token of a rank
    exchange: tuple[float, float] = (
        0.05,
        0.32,
    )  # a micro-batch's gradients, to 8 ranks, and to more
    push: float = 2.0
    ask: float = 0.0  # a request, of the controller; the others are of a token
    read: float = 0.0
    ship: float = 0.0  # the run hash, and the bytes for the ranks
    held: float = 0.0  # bytes


def measured() -> Costs:
    """Return the costs with those of the controller from the records."""
    us = json.loads((RESULTS / "controller_time.json").read_text())["arrays"]["us_a_token"]
    memory = json.loads((RESULTS / "controller_memory.json").read_text())
    load = json.loads((RESULTS / "scale_load.json").read_text())
    read, row = us["from the socket to the trajectory"] / 1e6, memory["rows"][-1]
    sampling = load["processor seconds"]["sampling"]
    tokens = memory["prompt_tokens"] + memory["response_tokens"]
    return Costs(
        ask=max(sampling - load["tokens"] * read, 0.0) / load["requests"],
        read=read,
        ship=(us["into the run hash"] + us["to the bytes for the ranks"]) / 1e6,
        held=(row["held_kib_per_sample"] + row["sent_kib_per_sample"]) * 1024 / tokens,
    )


@dataclass(eq=False, slots=True)
class Attempt:
    """An episode of one answer, as `FreeGroups` knows it."""

    number: int
    tokens: int
    prompt: int
    asked: float = -1.0
    version: int | None = None
    is_complete: bool = False

    def record(self) -> list[Any]:
        """Return its one branch."""
        spans = [] if self.version is None else [SimpleNamespace(version=self.version)]
        return [SimpleNamespace(spans=spans)]


@dataclass(slots=True)
class Engine:
    """An engine that advances all its responses by a token at a time, and admits those whose whole
    length fits its cache."""

    costs: Costs
    now: float = 0.0
    done: float = 0.0
    cached: float = 0.0
    reserved: int = 0
    busy: float = 0.0
    ends: list[tuple[float, int, Attempt]] = field(default_factory=list)
    waiting: deque[Attempt] = field(default_factory=deque)
    taken: int = 0

    def advance(self, at: float) -> None:
        """Sample until `at`: n tokens of b responses take n * pace + cached * b * n^2 / 2."""
        seconds, b = at - self.now, len(self.ends)
        if seconds <= 0:
            return
        self.now = at
        if b:
            pace = self._pace()
            n = 2 * seconds / (pace + math.sqrt(pace**2 + 2 * self.costs.cached * b * seconds))
            self.done, self.cached = self.done + n, self.cached + n * b
            self.busy += seconds

    def _pace(self) -> float:
        costs = self.costs
        return costs.pass_ + costs.row * len(self.ends) + costs.cached * self.cached

    def admit(self, version: int) -> None:
        """Begin what waits, as far as there is room; an empty engine takes anything."""
        while self.waiting and (
            not self.ends
            or self.reserved + self.waiting[0].prompt + self.waiting[0].tokens <= self.costs.cache
        ):
            attempt = self.waiting.popleft()
            attempt.version = version if attempt.version is None else attempt.version
            self.reserved += attempt.prompt + attempt.tokens
            self.cached += attempt.prompt
            self.taken += 1
            heapq.heappush(self.ends, (self.done + attempt.tokens, self.taken, attempt))
            self.fill(attempt.prompt)

    def fill(self, tokens: float) -> None:
        self.now, self.busy = (each + tokens * self.costs.prefill for each in (self.now, self.busy))

    def next_end(self) -> float:
        n, b = self.ends[0][0] - self.done, len(self.ends)
        return self.now + n * self._pace() + self.costs.cached * b * n * n / 2

    def finish(self, at: float) -> Attempt:
        self.advance(at)
        self.done, _, attempt = heapq.heappop(self.ends)
        self.reserved -= attempt.prompt + attempt.tokens
        self.cached = self.cached - attempt.prompt - attempt.tokens if self.ends else 0.0
        return attempt


class Fleet:
    """Engines, and the queue of the controller that keeps up to `slots` requests in flight on each."""

    def __init__(self, count: int, costs: Costs):
        self.costs, self.engines = costs, [Engine(costs) for _ in range(count)]
        self._queue, self._counts, self._stamps = deque[Attempt](), [0] * count, [0] * count
        self._events: list[tuple[float, int, int]] = []
        self.version, self.longest_wait = 0, 0.0

    def put(self, at: float, attempts: Sequence[Attempt]) -> None:
        """Ask for these; the engine with the fewest requests gets the next."""
        self._queue.extend(attempts)
        touched = set[int]()
        while self._queue and (fewest := min(self._counts)) < self.costs.slots:
            i = self._counts.index(fewest)
            self.engines[i].advance(at)
            self._queue[0].asked = at
            self.engines[i].waiting.append(self._queue.popleft())
            self._counts[i] += 1
            touched.add(i)
        for i in touched:
            self._plan(i)

    def _plan(self, i: int) -> None:
        self.engines[i].admit(self.version)
        self._stamps[i] += 1
        if self.engines[i].ends:
            heapq.heappush(self._events, (self.engines[i].next_end(), i, self._stamps[i]))

    def next_end(self) -> float:
        """Return when the next response ends; infinity if there is none."""
        while self._events and self._events[0][2] != self._stamps[self._events[0][1]]:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else math.inf

    def pop(self) -> tuple[float, Attempt]:
        """Return when the next response ended, and the response."""
        at = self.next_end()
        i = heapq.heappop(self._events)[1]
        attempt = self.engines[i].finish(at)
        self._counts[i] -= 1
        self.longest_wait = max(self.longest_wait, at - attempt.asked)
        self._plan(i)
        self.put(at, ())
        return at, attempt

    def interrupt(self, at: float, version: int) -> None:
        """Push: all responses go on afterwards, and their tokens are prefilled again."""
        self.version = version
        for i, engine in enumerate(self.engines):
            engine.advance(at)
            engine.now = max(engine.now, at) + self.costs.push
            engine.fill(engine.cached)
            for attempt in (*engine.waiting, *(each for _, _, each in engine.ends)):
                attempt.asked = at + self.costs.push
            self._plan(i)


class Simulation:
    """A run of a schedule on so many GPUs."""

    def __init__(self, schedule: str, gpus: int, costs: Costs, groups: int = GROUPS):
        self.costs, self.schedule, self.ranks = costs, schedule, gpus // 2
        self.fleet = Fleet(gpus - self.ranks, costs)
        self.size, self.source = groups, iter(lengths(groups * SAMPLES * (STEPS + 6)))
        self.free_at, self.held, self.sums = 0.0, 0, Counter[str]()  # of the controller

    def open_group(self, number: int) -> list[Attempt]:
        return [Attempt(number, next(self.source), PROMPT) for _ in range(SAMPLES)]

    def work(self, at: float, seconds: float) -> float:
        """Have the controller do some work; return when it is done."""
        self.free_at = max(self.free_at, at) + seconds
        self.sums["controller"] += seconds
        return self.free_at

    def read(self) -> tuple[float, Attempt]:
        """Return when the controller has read the next response, and the response."""
        at, attempt = self.fleet.pop()
        attempt.is_complete = True
        self.held += attempt.tokens + attempt.prompt
        self.sums["most held"] = max(self.sums["most held"], self.held)
        return self.work(at, self.costs.ask + attempt.tokens * self.costs.read), attempt

    def draw(self, at: float, step: int) -> tuple[float, list[Attempt]]:
        """Sample a step's groups; return when the last answer is read, and the groups."""
        numbers = range(step * self.size, (step + 1) * self.size)
        batch = [attempt for number in numbers for attempt in self.open_group(number)]
        self.fleet.put(at, batch)
        ends = [self.read()[0] for _ in batch]
        self.sums["tail"] += ends[-1] - ends[len(ends) * 9 // 10]
        return ends[-1], batch

    def train(self, at: float, batch: Sequence[Attempt]) -> float:
        """Return when the ranks have trained on a batch that is there at `at`."""
        sampled = sum(each.tokens for each in batch)
        share = (sampled + sum(each.prompt for each in batch)) / self.ranks
        exchange = math.ceil(share / MICRO_BATCH) * self.costs.exchange[self.ranks > 8]
        at = self.work(at, sampled * self.costs.ship)
        self.sums["tokens"] += sampled
        self.sums["training"] += share * self.costs.train + exchange
        self.sums["exchange"] += exchange
        return at + share * self.costs.train + exchange

    def steps(self) -> Iterator[float]:
        """Yield when each step has ended, with its push."""
        return self._free() if self.schedule == "free" else self._lag(int(self.schedule[-1]))

    def _lag(self, lag: int) -> Iterator[float]:
        schedule = Schedule(lag=lag, first=0, last=STEPS)
        drawn, at = dict[int, list[Attempt]](), 0.0
        for version in range(STEPS):
            ahead = [*schedule.drawn_under(version)]
            if version in ahead:
                at, drawn[version] = self.draw(at, ahead.pop(0))
            ends, batch = at, drawn.pop(version)
            trained = self.train(at, batch)
            for step in ahead:
                ends, drawn[step] = self.draw(ends, step)
            self.held -= sum(each.tokens + each.prompt for each in batch)
            at = max(ends, trained) + self.costs.push
            yield at

    def _free(self) -> Iterator[float]:
        staleness, width = Staleness(most=STALENESS, batch=self.size), self.size * SAMPLES
        groups: Any = FreeGroups(self.open_group, width, staleness, (STEPS + 4) * self.size)
        flying, at = set[Attempt](), 0.0

        def timed(work: Any, *given: Any) -> Any:
            before = time.process_time()
            found = work(*given)
            self.sums["rule"] += time.process_time() - before
            return found

        def send(at: float, attempts: Sequence[Attempt]) -> None:
            self.fleet.put(at, new := [each for each in attempts if each not in flying])
            flying.update(new)

        def read() -> float:
            at, attempt = self.read()
            flying.discard(attempt)
            send(at, timed(groups.end, attempt))
            return at

        for version in range(STEPS):
            send(at, timed(groups.begin, version))
            while (taken := timed(groups.batch)) is None:
                at = read()
            batch = [attempt for group in taken for attempt in group]
            trained = self.train(at, batch)
            while self.fleet.next_end() <= trained:
                read()
            self.held -= sum(each.tokens + each.prompt for each in batch)
            self.fleet.interrupt(trained, version + 1)
            at = trained + self.costs.push
            yield at


def simulate(schedule: str, gpus: int, costs: Costs, groups: int = GROUPS) -> dict[str, Any]:
    """Return a row: means over the steps after WARM_UP, but for a run's last, where nobody draws."""
    run = Simulation(schedule, gpus, costs, groups)
    start, sums, busy = 0.0, Counter[str](), 0.0
    for step, at in enumerate(run.steps()):
        if step == WARM_UP - 1:
            start, sums = at, run.sums.copy()
            busy = sum(engine.busy for engine in run.fleet.engines)
        if step == STEPS - 2:
            break
    wall, engines = at - start, len(run.fleet.engines)
    busy = (sum(engine.busy for engine in run.fleet.engines) - busy) / engines / wall
    of, steps = {name: run.sums[name] - sums[name] for name in run.sums}, STEPS - 1 - WARM_UP
    return {
        "schedule": schedule,
        "gpus": gpus,
        "seconds a step": wall / steps,
        "tokens a second and GPU": of["tokens"] / wall / gpus,
        "engines sample": busy,
        "last tenth of the responses": of.get("tail", 0.0) / wall,
        "trainer at work": of["training"] / wall,
        "of it exchanging gradients": of["exchange"] / of["training"],
        "processor seconds of the free schedule's rule a step": of.get("rule", 0.0) / steps,
        "limits": {
            "controller's thread": of["controller"] / wall,
            "a request's timeout": run.fleet.longest_wait / REQUEST_TIMEOUT,
            "controller's memory": run.sums["most held"] * costs.held / HOST_BYTES,
        },
    }


def picture(rows: Sequence[dict[str, Any]], image: Path) -> None:
    """Draw a PNG: where the GPUs' time goes, and the part of each limit that is used."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.8))
    names, bottom = [f"{row['gpus']}\n{row['schedule']}" for row in rows], [0.0] * len(rows)
    for side, key, color in (("engines", "engines sample", "b"), ("ranks", "trainer at work", "g")):
        for what, alpha in (("at work", 0.8), ("waiting", 0.2)):
            part = [(row[key] if what == "at work" else 1 - row[key]) / 2 for row in rows]
            left.bar(names, part, bottom=bottom, label=f"{side} {what}", color=color, alpha=alpha)
            bottom = [a + b for a, b in zip(bottom, part, strict=True)]
    for name in rows[0]["limits"]:
        right.plot(names, [row["limits"][name] for row in rows], "o", label=name)
    right.set(yscale="log", ylabel="part of the limit that is used")
    left.set(ylabel="share of the GPUs' time")
    for axis in (left, right):
        axis.tick_params(axis="x", labelsize="x-small")
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)


def main() -> None:
    record, image = map(Path, sys.argv[1:])
    costs = measured()
    rows = [simulate(schedule, gpus, costs) for gpus in GPUS for schedule in SCHEDULES]
    found = {"trajectories": GROUPS * SAMPLES, "costs": vars(costs), "rows": rows}
    record.write_text(json.dumps(found, indent=2) + "\n")
    picture(rows, image)


if __name__ == "__main__":
    main()
