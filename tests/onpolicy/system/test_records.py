"""What is read back has the shape that it was written in, or its first fault is named."""

import re

import pytest
from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict

from onpolicy.system.records import CLOSED, checked


@with_config(CLOSED)
class Inner(TypedDict):
    number: float
    names: list[str]


@with_config(CLOSED)
class Outer(TypedDict):
    step: int
    inner: Inner


SHAPE = TypeAdapter(Outer)
RIGHT = {"step": 1, "inner": {"number": 2, "names": ["a"]}}


def test_a_record_of_the_shape_is_taken():
    assert checked(SHAPE, RIGHT) == RIGHT


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ([], "the record=[]: "),
        ({"step": 1}, "holds no inner"),
        ({**RIGHT, "step": "1"}, "step='1': should be a valid integer"),
        ({**RIGHT, "step": True}, "step=True: should be a valid integer"),
        ({**RIGHT, "step": 1.0}, "step=1.0: should be a valid integer"),
        ({**RIGHT, "more": 1}, "more=1: Extra inputs are not permitted"),
        ({**RIGHT, "inner": {"number": 1, "names": [2]}}, "inner.names.0=2: should be a valid str"),
        ({**RIGHT, "inner": "x" * 99}, f"inner='{'x' * 59}...: "),
    ],
)
def test_the_first_fault_is_named_with_its_place_and_value(record, fault):
    with pytest.raises(ValueError, match=f"^{re.escape(fault)}"):
        checked(SHAPE, record)
