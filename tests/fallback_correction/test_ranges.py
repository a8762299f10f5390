"""Ranges that stand beside the fields of a record."""

import math
from dataclasses import dataclass
from typing import Annotated

import pytest

from fallback_correction.config import CorrectionSettings
from fallback_correction.ranges import (
    MAY_BE_INFINITE,
    FieldError,
    NotAbove,
    above,
    at_least,
    at_most,
    below,
    require_ranges,
)


@dataclass(kw_only=True)
class Record:
    free: float = 0.0
    count: Annotated[int | None, at_least(1)] = None
    large: Annotated[int, at_most(2**40)] = 0
    share: Annotated[float, above(0), below(1)] = 0.5
    bound: Annotated[float, above(0), MAY_BE_INFINITE] = 1.0
    lowest: Annotated[float | None, NotAbove("bound")] = None
    several: Annotated[tuple[int, ...], at_least(0)] = ()


@pytest.mark.parametrize(
    "values",
    [
        {}, {"count": 1}, {"count": 2**31 - 1}, {"large": 2**40}, {"bound": math.inf},
        {"lowest": 1.0}, {"lowest": 3.0, "bound": 3.0}, {"several": (0, 5)}, {"free": -3.4e38},
    ],
)  # fmt: skip
def test_what_is_within_is_taken(values):
    require_ranges(Record(**values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count=0: must be at least 1. Give a larger value."),
        ({"count": 2**31}, "count=2147483648: must fit 32 bits: at most 2147483647."),
        ({"large": 2**40 + 1}, "large=1099511627777: must be at most 1.099511628e"),
        ({"share": 0.0}, "share=0.0: must be greater than 0. Give a larger value."),
        ({"share": 1.0}, "share=1.0: must be less than 1. Give a smaller value."),
        ({"share": math.nan}, "share=nan: must be greater than 0."),
        ({"free": math.nan}, "free=nan: must be a finite number of at most 3.4e"),
        ({"free": math.inf}, "free=inf: must be a finite number"),
        ({"bound": 1e39}, "bound=1e.39: must be a finite number"),
        ({"lowest": 1.5}, "lowest=1.5: must not exceed bound 1.0. Change one of them."),
        ({"several": (3, -1)}, r"several=\(3, -1\): must be at least 0."),
    ],
)
def test_what_is_beyond_is_refused_with_the_rule_and_the_remedy(values, message):
    with pytest.raises(FieldError, match=f"^{message}"):
        require_ranges(Record(**values))


def test_the_rule_can_be_said_under_other_names():
    with pytest.raises(FieldError) as error:
        require_ranges(Record(lowest=1.5))
    said = error.value.said(lambda name: f"--{name}")
    assert said == "must not exceed --bound 1.0. Change one of them."


@pytest.mark.parametrize(
    ("settings", "weights", "rejection"),
    [
        ({}, (0.0, 2.0), (0.5, 2.0)),
        ({"tis_mode": "clip", "tis_upper_bound": 4.0}, (0.25, 4.0), (0.25, 4.0)),
        ({"tis_mode": "mask"}, (0.0, 2.0), (0.5, 2.0)),
        ({"tis_mode": "mask", "tis_lower_bound": 0.1}, (0.1, 2.0), (0.1, 2.0)),
        ({"rs_lower_bound": 0.0, "rs_upper_bound": 8.0}, (0.0, 2.0), (0.0, 8.0)),
    ],
)
def test_bounds_that_are_not_given_fall_back(settings, weights, rejection):
    settings = CorrectionSettings(**settings)
    assert (settings.weight_bounds, settings.rejection_bounds) == (weights, rejection)


def test_nothing_is_applied_unless_it_is_asked_for():
    settings = CorrectionSettings(tis_level="sequence", rs_level="geometric")
    config = settings.correction()
    assert (config.level, config.rules, config.veto) == ("none", (), None)
