"""What is read back has the shape that it was written in, or its first fault is named."""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Annotated

import pytest
from pydantic import Field

from onpolicy.system.records import Count, Shape, written_as


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    number: float = 0.0
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    step: int
    inner: Inner
    pairs: tuple[tuple[int, bool], ...] = ()
    by_step: dict[Count, Inner] = field(default_factory=dict)
    letter: Annotated[str, written_as(Count, "ab".index, lambda at, letters: letters[at])] = "a"
    unwritten: Annotated[int, Field(exclude=True)] = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    r: int
    s: str = "x"


SHAPE = Shape(Outer)
RIGHT = {
    "step": 1, "inner": {"number": 2, "names": ["a"]}, "pairs": [[1, True]],
    "by_step": {"3": {"number": 0.5, "names": []}}, "letter": 1,
}  # fmt: skip


def test_a_record_of_the_shape_is_taken():
    made = SHAPE.take(RIGHT, "ab")
    assert made == Outer(
        step=1,
        inner=Inner(number=2, names=["a"]),
        pairs=((1, True),),
        by_step={3: Inner(number=0.5)},
        letter="b",
    )
    assert json.loads(SHAPE.write(made)) == RIGHT and made.unwritten == 7


def test_numbers_and_texts_of_any_kind_come_back():
    odd = Outer(step=10**30, inner=Inner(number=math.inf, names=["\ud800", "\0\u2028"]))
    assert SHAPE.read(SHAPE.write(odd), "ab") == odd
    assert math.isnan(Shape(Inner).read(Shape(Inner).write(Inner(number=math.nan))).number)


def test_a_record_of_others_may_lack_and_add_fields():
    shape = Shape(Others, is_open=True)
    assert shape.take({"r": 1, "more": 2}) == Others(r=1)
    with pytest.raises(ValueError, match=r"^r='1': should be a valid integer"):
        shape.take({"r": "1"})


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ([], "the record=[]: "),
        ({"step": 1}, "holds no inner"),
        ({**RIGHT, "step": "1"}, "step='1': should be a valid integer"),
        ({**RIGHT, "step": True}, "step=True: should be a valid integer"),
        ({**RIGHT, "step": 1.0}, "step=1.0: should be a valid integer"),
        ({**RIGHT, "more": 1}, "more=1: Unexpected keyword argument"),
        ({**RIGHT, "unwritten": 1}, "unwritten=1: Unexpected keyword argument"),
        ({**RIGHT, "inner": {"number": 1}}, "holds no inner.names"),
        ({**RIGHT, "pairs": [[1, 1]]}, "pairs.0.1=1: should be a valid boolean"),
        ({**RIGHT, "pairs": [[1]]}, "holds no pairs.0.1"),
        ({**RIGHT, "pairs": "ab"}, "pairs='ab': should be a valid tuple"),
        ({**RIGHT, "by_step": {"x": {}}}, "by_step.x.[key]='x': should be a valid integer"),
        ({**RIGHT, "letter": True}, "letter=True: should be a valid integer"),
        ({**RIGHT, "inner": {"number": 1, "names": [2]}}, "inner.names.0=2: should be a valid str"),
        ({**RIGHT, "inner": "x" * 99}, f"inner='{'x' * 59}...: "),
    ],
)
def test_the_first_fault_is_named_with_its_place_and_value(record, fault):
    with pytest.raises(ValueError, match=f"^{re.escape(fault)}"):
        SHAPE.take(record, "ab")


@pytest.mark.parametrize("text", ["", "{", "nothing", "[" * 100_000])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError, match=r"(Expecting|no record is nested)"):
        SHAPE.read(text)
