"""The record of runs whose answers grow."""

import json
from pathlib import Path

import pytest

import benchmarks
from fallback_correction.length_decay import LengthDecay, LengthDecayConfig

RESULT = Path(benchmarks.__path__[0]) / "results" / "length_surge.json"


@pytest.mark.parametrize(("number", "onset", "period", "scale"), [(0, 29, 52, 0.5), (1, 0, 0, 1.0)])
def test_the_schedule_makes_of_the_recorded_lengths_what_it_made_of_them_in_the_run(
    number, onset, period, scale
):
    curves = json.loads(RESULT.read_text())[number]
    decay = LengthDecay(LengthDecayConfig())
    for step, seen in enumerate(zip(curves["length"], curves["truncated"], strict=True)):
        decay.step(*seen)
        for name in ("onset", "period", "scale"):
            assert decay.metrics()[f"lr_decay/{name}"] == curves[name][step]
    assert [curves[name][-1] for name in ("onset", "period", "scale")] == [onset, period, scale]
