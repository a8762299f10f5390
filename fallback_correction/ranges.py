"""What a value must be, written beside its field: `eta: Annotated[float, at_least(0)] = 1.0`.

`require_ranges` holds a record to it. Who reads the fields under other names, as a command line does,
asks `broken_rule` and says the rule in those. `ReadBy` says what reads a field, for who refuses a value
that nothing would read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

Number = int | float

INT_MAX = 2**31 - 1
"""The largest integer where no field says another: what fits 32 bits."""

FLOAT_MAX = 3.4e38
"""The largest magnitude of a float32."""


@dataclass(frozen=True)
class Rule:
    """What a value must be. A value that is None is held to nothing, and a tuple item by item."""

    holds: Callable[[Any], bool]
    """Compared so that NaN, which is neither smaller nor larger than anything, breaks it."""

    broken: str
    """What is said of a value that breaks it: the rule and the remedy."""

    says_the_largest: bool = False
    """Whether the value may be beyond what fits 32 bits, or a float32."""


@dataclass(frozen=True)
class NotAbove:
    """The value must not exceed that of another field of the record."""

    other: str


@dataclass(frozen=True)
class ReadBy:
    """The value is read in some records alone; in others it would do nothing."""

    switch: str
    """What makes it be read, for messages; {name} stands for another field of the record."""

    reads: Callable[[Any], object]
    """Whether a record is one that reads it."""


def at_least(bound: Number) -> Rule:
    return Rule(lambda x: x >= bound, f"must be at least {bound:g}. Give a larger value.")


def above(bound: Number) -> Rule:
    return Rule(lambda x: x > bound, f"must be greater than {bound:g}. Give a larger value.")


def at_most(bound: Number) -> Rule:
    return Rule(lambda x: x <= bound, f"must be at most {bound:.10g}. Give a smaller value.", True)


def below(bound: Number) -> Rule:
    return Rule(lambda x: x < bound, f"must be less than {bound:g}. Give a smaller value.")


FINITE = f"must be a finite number of at most {FLOAT_MAX:g}. Give such a number."

MAY_BE_INFINITE = Rule(lambda x: x == math.inf or abs(x) <= FLOAT_MAX, FINITE, True)

_BY_KIND = {
    int: Rule(
        lambda x: abs(x) <= INT_MAX, f"must fit 32 bits: at most {INT_MAX}. Give a smaller value."
    ),
    float: Rule(lambda x: abs(x) <= FLOAT_MAX, FINITE),
}


class FieldError(ValueError):
    """A field's value that breaks a rule: `name=value: rule. Remedy.`"""

    def __init__(self, name: str, value: object, rule: str, others: Sequence[str] = ()) -> None:
        """others: the fields that `rule` mentions, as {0}, {1}, ..."""
        self.name, self.value, self.rule, self.others = name, value, rule, others
        super().__init__(f"{name}={value}: {self.said(str)}")

    def said(self, spell: Callable[[str], str]) -> str:
        """The rule and the remedy, with other fields under the names that `spell` gives them."""
        return self.rule.format(*map(spell, self.others)) if self.others else self.rule


def notes_of(record: type) -> Mapping[str, tuple[Any, ...]]:
    """What stands beside the type of every field."""
    return _notes_of(record)


@cache
def _notes_of(record: type) -> Mapping[str, tuple[Any, ...]]:
    hints = get_type_hints(record, include_extras=True)
    return {
        name: get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        for name, hint in hints.items()
    }


def broken_rule(value: object, notes: Sequence[Any]) -> str | None:
    """What is said of the first rule among `notes` that the value breaks, if there is one."""
    for item in value if isinstance(value, tuple) else (value,):
        rules = [note for note in notes if isinstance(note, Rule)]
        if type(item) in _BY_KIND and not any(rule.says_the_largest for rule in rules):
            rules.append(_BY_KIND[type(item)])
        for rule in rules:
            if item is not None and not rule.holds(item):
                return rule.broken
    return None


def require_ranges(record: Any) -> None:
    """Raise FieldError for the first field whose value is beyond what stands beside it."""
    fields = notes_of(type(record)).items()
    for name, notes in fields:
        if rule := broken_rule(getattr(record, name), notes):
            raise FieldError(name, getattr(record, name), rule)
    for name, notes in fields:
        require_order(record, name, notes)


def require_order(record: Any, name: str, notes: Sequence[Any]) -> None:
    """Raise FieldError if a field of the record exceeds one that it must not."""
    for other in (note.other for note in notes if isinstance(note, NotAbove)):
        low, high = getattr(record, name), getattr(record, other)
        if low is not None and high is not None and low > high:
            rule = f"must not exceed {{0}} {high}. Change one of them."
            raise FieldError(name, low, rule, [other])
