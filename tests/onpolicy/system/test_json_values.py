"""What data files hold and JSON has no word for.

After reports of others: great_expectations#7042 and mmaction2#108 (times and arrays are not JSON
serializable), kumo-rfm-mcp#65 (NaN in a body that strict readers refuse).
"""

import datetime as dt
import json
import math
from decimal import Decimal
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.system.json_values import default, json_value

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])),
                                                    inner),
)  # fmt: skip


@given(JSON)
def test_what_json_can_say_stays_as_it_is(value):
    assert json.dumps(json_value(value)) == json.dumps(value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (dt.datetime(2024, 5, 1, 2, 3, 4, 5), "2024-05-01T02:03:04.000005"),
        (dt.datetime(2024, 5, 1, tzinfo=dt.timezone.utc), "2024-05-01T00:00:00Z"),  # noqa: UP017
        (dt.date(2024, 5, 1), "2024-05-01"),
        (dt.time(2, 3), "02:03:00"),
        (dt.timedelta(days=1, seconds=3.5), "P1DT3.5S"),
        (Decimal("1.10"), "1.10"),
        (b"\xff\xfe", "//4="),
        (UUID(int=3), "00000000-0000-0000-0000-000000000003"),
        ({3, 1}, [1, 3]),
        ((1, (2,)), [1, [2]]),
        (np.float32(1.5), 1.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1.0, np.nan]]), [[1.0, None]]),
        (np.datetime64("2024-05-01"), "2024-05-01"),
        (math.nan, None),
        ({1: 2, None: 3, dt.date(2024, 5, 1): 4}, {"1": 2, "null": 3, "2024-05-01": 4}),
    ],
    ids=repr,
)
def test_what_it_has_no_word_for_is_text_and_no_number_is_null(value, said):
    assert json_value({"deep": [value]}) == {"deep": [said]}
    assert json.loads(json.dumps(json_value(value), allow_nan=False)) == said


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.inf, "inf: JSON has no number"),
        (np.float32(-math.inf), "-inf: JSON has no number"),
        ("\ud800", "surrogates not allowed"),
        ({"\udfff": 1}, "surrogates not allowed"),
        ({1: 2, "1": 3}, "two of its keys are the same text"),
        (NotImplemented, "type NotImplementedType is not JSON serializable"),
        (range(3), "type range is not JSON serializable"),
    ],
    ids=repr,
)
def test_what_no_strict_reader_takes_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        json_value({"deep": [value]})


def test_an_encoder_is_given_numbers_of_numpy_and_nan_is_left_to_be_refused():
    assert json.dumps({"x": np.float32(1.5)}, default=default) == '{"x": 1.5}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        json.dumps(np.float32(math.nan), default=default, allow_nan=False)
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps(object(), default=default)
