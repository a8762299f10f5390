"""Accuracy of the surge detector on made-up length curves; prints a Markdown table.

python benchmarks/surge_detector.py [number of noise seeds]
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from itertools import groupby
from statistics import NormalDist, median

from fallback_correction.length_decay import SurgeDetector

NORMAL = NormalDist()
SPREAD = 0.8
"""Standard deviation of the logarithm of one response's length."""


@dataclass(frozen=True)
class Shape:
    """One curve of true mean lengths."""

    name: str
    means: list[float]
    """Tokens, before truncation, one entry a step. Example: [1000.0, 1000.0, 3500.0]"""
    onset: int | None = None
    """First raised step, from 1; None where there is no surge. Example: 3"""
    limit: int | None = 8192
    """Maximum response length in tokens."""
    noise: float = 0.05
    """Standard deviation of the logarithm of a step's mean. Example: 0.05"""
    drift: float = 0.0
    """Correlation of that noise between consecutive steps, in [0, 1). Example: 0.9"""
    late: int = 5
    """Steps by which the onset may be found late: a slow rise leaves the noise later."""
    beyond: bool = False
    """Whether the curve is beyond the detector's promise; in the table to show its limits."""


def surge(onset: int, high: float = 3500.0, rise: int = 10, n: int = 300) -> list[float]:
    """Return a curve of 1000 before step `onset`, then up to `high` in `rise` steps."""
    progress = (min(max(t - onset + 1, 0) / rise, 1.0) for t in range(1, n + 1))
    return [1000.0 + (high - 1000.0) * p for p in progress]


def ramp(start: float, end: float, steps: int) -> list[float]:
    """Return a curve from `start` to `end` in `steps` steps, then level."""
    return [start + (end - start) * min(t / steps, 1.0) for t in range(300)]


def bump(factor: float, at: list[int], width: int) -> list[float]:
    """Return a curve of 1000, and `factor` times that for `width` steps from each step of `at`."""
    inside = {t for start in at for t in range(start, start + width)}
    return [1000.0 * (factor if t in inside else 1.0) for t in range(1, 301)]


def times(first: list[float], second: list[float]) -> list[float]:
    """Return the product of two curves, as a multiple of 1000 tokens."""
    return [a * b / 1000 for a, b in zip(first, second, strict=True)]


SHAPES = [
    Shape("1000 to 3500 in 10 steps", surge(100), 100),
    Shape("1000 to 3000 in 3 steps", surge(100, 3000, 3), 100),
    Shape("1000 to 4000 in 20 steps (4B)", surge(110, 4000, 20), 110),
    Shape("1000 to 3000 in 20 steps (4B)", surge(110, 3000, 20), 110),
    Shape("1000 to 3500 in 5 steps (8B)", surge(90, rise=5), 90),
    Shape("the same, noise 10 %", surge(90, rise=5), 90, noise=0.1),
    Shape("the same, noise 20 %", surge(90, rise=5), 90, noise=0.2),
    Shape("the same, drifting noise 10 %", surge(90, rise=5), 90, noise=0.1, drift=0.9),
    Shape("1000 to 3500 in 30 steps", surge(100, rise=30), 100, late=12),
    Shape("1000 to 3500 in 40 steps", surge(100, rise=40), 100, late=12),
    Shape("1000 to 3500 in 50 steps", surge(100, rise=50), 100, late=12),
    Shape("1000 to 3500 in 60 steps", surge(100, rise=60), 100, late=12),
    Shape("1000 to 3500 in 80 steps", surge(100, rise=80), 100, late=12),
    Shape("the same, from step 60, limit 2000", surge(60, rise=80), 60, limit=2000, late=12),
    Shape("at step 11, 1000 to 3500 in 3 steps", surge(11, rise=3), 11),
    Shape("in the burn-in: at step 2, in 1 step", surge(2, rise=1)),
    Shape("in the burn-in: at step 3, in 3 steps", surge(3, rise=3)),
    Shape("the same, noise 10 %", surge(3, rise=3), noise=0.1),
    Shape("in the burn-in: at step 3, in 10 steps", surge(3)),
    Shape("in the burn-in: at step 8, in 10 steps", surge(8)),
    Shape("after a fall from 2500 to 1000", times(ramp(2500, 1000, 40), surge(100)), 100),
    Shape("after slow growth to 1500", times(ramp(1000, 1500, 100), surge(100)), 100),
    Shape("after a dip to 400", times(bump(0.4, [60], 15), surge(100)), 100),
    Shape("back to 2000 after 15 steps", times(surge(100), surge(115, 570, 5)), 100),
    Shape("1000 to 3500, limit 3000", surge(100), 100, limit=3000),
    Shape("1000 to 3000, limit 3000", surge(100, 3000), 100, limit=3000),
    Shape("1000 to 3500, limit 2000", surge(100), 100, limit=2000),
    Shape("1000 to 3500, limit 2000, noise 10 %", surge(100), 100, limit=2000, noise=0.1),
    Shape("level", surge(1, 1000)),
    Shape("level, noise 20 %", surge(1, 1000), noise=0.2),
    Shape("level, drifting noise 10 %", surge(1, 1000), noise=0.1, drift=0.9),
    Shape("slow growth to 4000 in 300 steps", ramp(1000, 4000, 300)),
    Shape("growth to 4000 in 120 steps", ramp(1000, 4000, 120)),
    Shape("the same, limit 3000", ramp(1000, 4000, 120), limit=3000),
    Shape("the same, limit 2000", ramp(1000, 4000, 120), limit=2000),
    Shape("the same, noise 10 %", ramp(1000, 4000, 120), noise=0.1),
    Shape("dips to 400 for 15 steps", bump(0.4, [60, 120, 200], 15)),
    Shape("a dip to 300 for 25 steps", bump(0.3, [100], 25)),
    Shape("spikes to 3500 for 3 steps", bump(3.5, [50, 100, 104, 200], 3)),
    Shape("step to 1600, for good", surge(100, 1600, 3)),
    Shape("fall from 3000 to 1000", ramp(3000, 1000, 50)),
    Shape("beyond: level, drifting noise 20 %", surge(1, 1000), noise=0.2, drift=0.9, beyond=True),
    Shape("beyond: 1000 to 2100 in 5 steps", surge(100, 2100, 5), 100, beyond=True),
    Shape(
        "beyond: 1000 to 3500 in 80 steps, noise 10 %",
        surge(100, rise=80),
        100,
        noise=0.1,
        beyond=True,
    ),
    Shape("beyond: 1000 to 3500 in 120 steps", surge(100, rise=120), 100, beyond=True),
    Shape("beyond: 1000 to 3500 in 150 steps", surge(100, rise=150), 100, beyond=True),
    Shape("beyond: in 50 steps from step 12", surge(12, rise=50), 12, beyond=True),
    Shape("beyond: surge during a fall", times(ramp(2500, 1000, 40), surge(30)), 30, beyond=True),
    Shape("beyond: a dip to 300 for 40 steps", bump(0.3, [100], 40), beyond=True),
]


def truncate(mean: float, limit: int | None) -> tuple[float, float]:
    """Return the mean length and truncated ratio of log-normal lengths cut off at `limit`."""
    if limit is None:
        return mean, 0.0
    z = (math.log(limit / mean) + SPREAD**2 / 2) / SPREAD
    truncated = 1 - NORMAL.cdf(z)
    return mean * NORMAL.cdf(z - SPREAD) + limit * truncated, truncated


def series(shape: Shape, seed: int) -> list[tuple[float, float]]:
    """Return what a run of this shape would report: (mean length, truncated ratio) of every step."""
    rng, noise, steps = random.Random(seed), 0.0, []
    for mean in shape.means:
        fresh = rng.gauss(0.0, shape.noise)
        noise = shape.drift * noise + math.sqrt(1 - shape.drift**2) * fresh
        steps.append(truncate(mean * math.exp(noise), shape.limit))
    return steps


def detect(shape: Shape, seed: int) -> SurgeDetector:
    """Return the detector, with its defaults, after the surge or at the end of the series."""
    detector = SurgeDetector()
    for mean_length, truncated_ratio in series(shape, seed):
        if detector.update(mean_length, truncated_ratio) is not None:
            break
    return detector


def spread(values: list[int]) -> str:
    """Return median and range. Example: '101 (100 to 103)'"""
    if not values:
        return "-"
    return f"{median(values):g} ({min(values)} to {max(values)})"


def cells(shape: Shape, seeds: int) -> list[str]:
    """Return a shape's line of the table, without its name."""
    runs = [detect(shape, seed) for seed in range(seeds)]
    found = [run.onset for run in runs if run.onset is not None]
    errors = [] if shape.onset is None else [onset - shape.onset for onset in found]
    # A surge reported well before the true one is a false alarm too.
    early = [error for error in errors if error < -5]
    false_alarms = len(found) if shape.onset is None else len(early)
    missed = "-" if shape.onset is None else str(seeds - len(found))
    onset = str(shape.onset or "none")
    return [onset, spread(errors), missed, str(false_alarms)]


def table(seeds: int) -> str:
    """Return the whole table; neighbours with the same cells share a line."""
    head = "| mean length, tokens | true onset | error | missed | false alarms |"
    lines = [head, "|---" * 5 + "|"]
    for same, shapes in groupby(SHAPES, lambda shape: cells(shape, seeds)):
        names = "; ".join(shape.name for shape in shapes)
        lines.append("| " + " | ".join([names, *same]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
