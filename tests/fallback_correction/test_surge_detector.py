import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.surge_detector import SHAPES, detect, series, surge, table
from fallback_correction.surge_detector import SurgeDetector, SurgeDetectorConfig

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


def test_table_in_the_docs_is_what_the_script_prints():
    page = Path(__file__).parents[2] / "docs" / "length_decay.md"
    assert table(100) in page.read_text()


@pytest.mark.parametrize(("onset", "confirmed"), [(100, 104), (90, 94), (11, 15)])
def test_sudden_surge_is_confirmed_after_k_steps_and_back_dated(onset, confirmed):
    detector, returned = feed(surge(onset, rise=1))
    assert returned == {confirmed: onset}
    assert (detector.onset, detector.confirmed_at) == (onset, confirmed)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_confirmation_takes_k_steps(k):
    assert feed(surge(50, rise=1), confirmation_steps=k)[1] == {49 + k: 50}


def test_rise_shorter_than_the_confirmation_is_no_surge():
    spike = [1000.0] * 50 + [3500.0] * 4 + [1000.0] * 50
    assert feed(spike)[1] == {}
    assert feed(spike, confirmation_steps=4)[1] == {54: 51}


def test_confirmation_steps_are_consecutive():
    steps = [1000.0] * 50 + ([3500.0] * 4 + [1500.0]) * 3 + [3500.0] * 5
    assert feed(steps)[1] == {70: 51}


@pytest.mark.parametrize("onset", range(2, 11))
@pytest.mark.parametrize("rise", [1, 3, 10])
def test_no_surge_begins_within_the_burn_in(onset, rise):
    """A jump at step 2 gave a period of 4, and the floor by step 20."""
    detector, returned = feed(surge(onset, rise=rise))
    assert returned == {} or (returned.keys() == {15} and onset + rise > 12)
    if onset < 9:
        assert returned == {} and detector.baseline == 3500.0


def test_the_first_step_after_the_burn_in_may_be_the_onset():
    assert feed(surge(11, rise=1))[1] == {15: 11}
    assert feed(surge(11, rise=1), burn_in=11)[1] == {}
    assert feed(surge(12, rise=1), burn_in=11)[1] == {16: 12}


def test_after_a_jump_in_the_burn_in_a_real_surge_is_found():
    jump = [1000.0] * 2 + [2500.0] * 97 + [6000.0] * 20
    assert feed(jump)[1] == {104: 100}


def test_a_slow_rise_is_found_from_where_it_leaves_its_level():
    """Past 1250 at the tenth step, past 2000 at the fortieth, and for 5 steps at the forty-fourth."""
    assert feed(surge(101, rise=100))[1] == {144: 110}
    assert feed(surge(101, rise=100), slow_rise_steps=30)[1] == {}


def test_a_slow_rise_without_a_level_before_it_is_growth():
    growth = [1000.0 + 40 * t for t in range(120)]
    assert feed(growth, level_ratio=99.0)[1] == {65: 25}
    assert feed(growth)[1] == {}


def test_a_slow_rise_that_began_in_the_burn_in_is_none():
    assert feed(surge(30, rise=60))[1] != {}
    assert feed(surge(30, rise=60), burn_in=60)[1] == {}


def test_a_state_from_before_slow_rises_is_taken_up():
    detector = SurgeDetector()
    for length in surge(100)[:90]:
        detector.update(length)
    old = {name: value for name, value in detector.state_dict().items() if name != "recent"}
    resumed = SurgeDetector()
    resumed.load_state_dict(old)
    onsets = [resumed.update(length) for length in surge(100)[90:120]]
    assert [onset for onset in onsets if onset] == [100]


def test_rise_ratio_is_exact():
    level = [1000.0] * 50
    assert feed(level + [2000.0] * 10)[1] == {55: 51}
    assert feed(level + [math.nextafter(2000.0, 0)] * 10)[1] == {}


def test_onset_is_the_first_step_at_the_onset_ratio():
    ramp = [1000.0] * 50 + [1249.0, 1250.0, 1600.0] + [2500.0] * 10
    assert feed(ramp)[1] == {58: 52}
    assert feed(ramp, onset_ratio=1.5)[1] == {58: 53}


def test_rise_that_takes_too_long_is_growth():
    ramp = [1000.0] * 50 + [1500.0] * 15 + [2500.0] * 20
    assert feed(ramp)[1] == {70: 51}
    assert feed(ramp, max_rise_steps=19, slow_rise_steps=19)[1] == {}
    assert feed(ramp, max_rise_steps=19, slow_rise_steps=25)[1] == {70: 51}


def test_baseline_forgets_what_is_older_than_its_window():
    fallen = [2500.0] * 30 + [1000.0] * 30 + [3000.0] * 20
    assert feed(fallen, baseline_window=40)[1] == {65: 61}
    assert feed(fallen, baseline_window=60)[1] == {}


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


def test_ratio_is_to_the_length_before_the_surge():
    detector, _ = feed(surge(100))
    assert detector.baseline == 1000.0
    assert detector.ratio == 3.5


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
        {"burn_in": 0},
        {"baseline_window": 0},
        {"confirmation_steps": 0},
        {"onset_ratio": 1.0},
        {"onset_ratio": 3.0},
        {"rise_ratio": 1.0},
        {"max_rise_steps": 4},
        {"slow_rise_steps": 4},
        {"level_ratio": 0.9},
        {"max_truncated_ratio": 1.0},
    ],
)
def test_setting_that_could_find_no_surge_is_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        SurgeDetectorConfig(**setting)
