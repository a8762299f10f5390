import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.surge_detector import SHAPES, detect, series, surge, table
from fallback_correction.length_decay import SurgeDetector, SurgeDetectorConfig

SURGES = [shape for shape in SHAPES if shape.onset and not shape.beyond]
OTHERS = [shape for shape in SHAPES if not shape.onset and not shape.beyond]


def feed(lengths, truncated=0.0, **config):
    """(detector, {step: what update returned}) without the Nones."""
    detector = SurgeDetector(SurgeDetectorConfig(**config))
    returned = {}
    for step, length in enumerate(lengths, start=1):
        onset = detector.update(length, truncated)
        if onset is not None:
            returned[step] = onset
    return detector, returned


@pytest.mark.parametrize("shape", SURGES, ids=lambda shape: shape.name)
def test_onset_is_found_in_time_under_20_seeds_of_noise(shape):
    onsets = [detect(shape, seed).onset for seed in range(20)]
    found = [onset is not None and -5 <= onset - shape.onset <= shape.late for onset in onsets]
    assert all(found), onsets


@pytest.mark.parametrize("shape", OTHERS, ids=lambda shape: shape.name)
def test_no_surge_is_seen_where_there_is_none_under_20_seeds_of_noise(shape):
    assert [detect(shape, seed).onset for seed in range(20)] == [None] * 20


def test_the_pages_table_is_what_the_script_prints():
    page = Path(__file__).parents[2] / "benchmarks" / "surge_detector.md"
    assert table(100) in page.read_text()


@pytest.mark.parametrize(("onset", "confirmed"), [(100, 104), (90, 94), (11, 15)])
def test_sudden_surge_is_confirmed_after_k_steps_and_back_dated(onset, confirmed):
    detector, returned = feed(surge(onset, rise=1))
    assert returned == {confirmed: onset}
    assert (detector.onset, detector.confirmed_at) == (onset, confirmed)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_confirmation_takes_k_steps(k):
    assert feed(surge(50, rise=1), confirmation_steps=k)[1] == {49 + k: 50}


LEVEL = [1000.0] * 50
SPIKE = LEVEL + [3500.0] * 4 + LEVEL
INTERRUPTED = LEVEL + ([3500.0] * 4 + [1500.0]) * 3 + [3500.0] * 5
RAMP = LEVEL + [1249.0, 1250.0, 1600.0] + [2500.0] * 10
STAIR = LEVEL + [1500.0] * 15 + [2500.0] * 20
FALLEN = [2500.0] * 30 + [1000.0] * 30 + [3000.0] * 20
GROWTH = [1000.0 + 40 * t for t in range(120)]
# Past 1250 at its tenth step, past 2000 at its fortieth, and for 5 steps at its forty-fourth.
SLOW = surge(101, rise=100)


@pytest.mark.parametrize(
    ("rule", "lengths", "config", "returned"),
    [
        ("a rise shorter than the confirmation is none", SPIKE, {}, {}),
        ("the confirmation may be as short", SPIKE, {"confirmation_steps": 4}, {54: 51}),
        ("steps of a confirmation are consecutive", INTERRUPTED, {}, {70: 51}),
        ("the first step after the burn-in counts", surge(11, rise=1), {}, {15: 11}),
        ("no step of the burn-in does", surge(11, rise=1), {"burn_in": 11}, {}),
        ("and the first after another does", surge(12, rise=1), {"burn_in": 11}, {16: 12}),
        ("a slow rise is found from where it leaves its level", SLOW, {}, {144: 110}),
        ("and is growth if it takes too long", SLOW, {"slow_rise_steps": 30}, {}),
        ("a slow rise has a level before it", GROWTH, {}, {}),
        ("unless none is asked for", GROWTH, {"level_ratio": 99.0}, {65: 25}),
        ("a slow rise after the burn-in is one", surge(30, rise=60), {}, {65: 35}),
        ("and none if it began within", surge(30, rise=60), {"burn_in": 60}, {}),
        ("a rise has the ratio", LEVEL + [2000.0] * 10, {}, {55: 51}),
        ("and not a bit less", LEVEL + [math.nextafter(2000.0, 0)] * 10, {}, {}),
        ("the onset is the first step at its ratio", RAMP, {}, {58: 52}),
        ("whatever that is", RAMP, {"onset_ratio": 1.5}, {58: 53}),
        ("a rise may take its time", STAIR, {}, {70: 51}),
        ("but no longer", STAIR, {"max_rise_steps": 19, "slow_rise_steps": 19}, {}),
        ("or it is a slow one", STAIR, {"max_rise_steps": 19, "slow_rise_steps": 25}, {70: 51}),
        ("the baseline forgets what is older than its window", FALLEN, {"baseline_window": 40},
            {65: 61}),
        ("and nothing within it", FALLEN, {"baseline_window": 60}, {}),
    ],
)  # fmt: skip
def test_a_surge_is_confirmed_at_its_step_and_back_dated_by_the_rule(
    rule, lengths, config, returned
):
    assert feed(lengths, **config)[1] == returned


@pytest.mark.parametrize("onset", range(2, 11))
@pytest.mark.parametrize("rise", [1, 3, 10])
def test_no_surge_begins_within_the_burn_in(onset, rise):
    """A jump at step 2 gave a period of 4, and the floor by step 20."""
    detector, returned = feed(surge(onset, rise=rise))
    assert returned == {} or (returned.keys() == {15} and onset + rise > 12)
    if onset < 9:
        assert returned == {} and detector.baseline == 3500.0


def test_a_state_from_before_slow_rises_is_taken_up():
    detector = SurgeDetector()
    for length in surge(100)[:90]:
        detector.update(length)
    old = {name: value for name, value in detector.state_dict().items() if name != "recent"}
    resumed = SurgeDetector()
    resumed.load_state_dict(old)
    onsets = [resumed.update(length) for length in surge(100)[90:120]]
    assert [onset for onset in onsets if onset] == [100]


def test_baseline_is_the_upper_quartile_so_that_most_of_the_window_may_be_a_dip():
    detector, returned = feed([1000.0] * 40 + [300.0] * 29)
    assert detector.baseline == 1000.0
    assert returned == {}
    detector.update(300.0)
    assert detector.baseline == 300.0


def test_rise_that_was_no_surge_becomes_part_of_the_baseline():
    detector, _ = feed([1000.0] * 4 + [3000.0] * 4 + [1000.0], baseline_window=4)
    assert detector.baseline == 3000.0


def test_surge_is_reported_once_and_never_moves():
    twice = surge(100, rise=1)[:200] + [1000.0] * 100 + surge(100, high=9000.0, rise=1)
    detector, returned = feed(twice)
    assert returned == {104: 100}
    assert (detector.onset, detector.confirmed_at, detector.step) == (100, 104, 600)


def test_truncation_hides_no_surge():
    """Exponential lengths of mean 1000, then 3000, under a limit of 3000: the means are 950 and 1896."""
    means = [1000.0] * 60 + [3000.0] * 20
    detectors = [SurgeDetector(), SurgeDetector(SurgeDetectorConfig(max_truncated_ratio=0.0))]
    for mean in means:
        cut = math.exp(-3000 / mean)
        for detector in detectors:
            detector.update(mean * (1 - cut), cut)
    corrected, as_reported = detectors
    assert (corrected.onset, corrected.confirmed_at) == (61, 65)
    assert corrected.baseline == pytest.approx(1000.0, rel=1e-12)
    assert as_reported.onset is None


def test_correction_for_truncation_is_bounded():
    detector, _ = feed([1000.0], truncated=1.0)
    assert detector.baseline == 1000.0 / (1 - 0.8)


@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 5),
    cut=st.integers(0, 160),
)
def test_resumed_detector_continues_identically(shape, seed, cut):
    steps = series(shape, seed)[:160]
    whole, first, second = SurgeDetector(), SurgeDetector(), SurgeDetector()
    for values in steps[:cut]:
        assert first.update(*values) == whole.update(*values)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for values in steps[cut:]:
        assert second.update(*values) == whole.update(*values)
        assert second.ratio == whole.ratio
    assert second.state_dict() == whole.state_dict()


@given(lengths=st.lists(st.floats(1.0, 1e5), max_size=80))
def test_onset_lies_before_its_confirmation_and_within_the_longest_rise(lengths):
    detector, returned = feed(lengths)
    for confirmed, onset in returned.items():
        assert detector.config.burn_in < onset <= confirmed
        assert confirmed - onset < detector.config.slow_rise_steps
    assert len(returned) <= 1


@pytest.mark.parametrize("length", [0.0, -1.0, math.nan, math.inf])
def test_impossible_length_is_refused(length):
    with pytest.raises(ValueError, match="mean_length="):
        SurgeDetector().update(length)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan])
def test_impossible_truncated_ratio_is_refused(ratio):
    with pytest.raises(ValueError, match="truncated_ratio="):
        SurgeDetector().update(1000.0, ratio)


@pytest.mark.parametrize(
    "setting",
    [
        {"burn_in": 0}, {"baseline_window": 0}, {"confirmation_steps": 0}, {"onset_ratio": 1.0},
        {"onset_ratio": 3.0}, {"rise_ratio": 1.0}, {"max_rise_steps": 4}, {"slow_rise_steps": 4},
        {"level_ratio": 0.9}, {"max_truncated_ratio": 1.0},
    ],
)  # fmt: skip
def test_setting_that_could_find_no_surge_is_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        SurgeDetectorConfig(**setting)
