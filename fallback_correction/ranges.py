"""Rules of a field's value, written in its annotation: `eta: Annotated[float, at_least(0)] = 1.0`.

`require_ranges` checks a record against them, and `require_choices` checks its names against the
`Literal` types of this package. Code that reads the fields under other names, such as a command line,
calls `broken_rule` and states the rule under those names. `ReadBy` names the setting that reads a
field, for code that refuses values which nothing would read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

Number = int | float

INT_MAX = 2**31 - 1
"""Largest integer unless a field states another: the limit of 32 bits."""

FLOAT_MAX = 3.4e38
"""Largest magnitude of a float32."""


@dataclass(frozen=True)
class Rule:
    """A rule of a value. None passes every rule, and a tuple is checked item by item."""

    holds: Callable[[Any], bool]
    """Comparison, written so that NaN, which is neither smaller nor larger than anything, breaks it."""

    broken: str
    """Message for a value that breaks it: the rule and the remedy."""

    says_the_largest: bool = False
    """Whether the value may exceed 32 bits, or a float32."""


@dataclass(frozen=True)
class NotAbove:
    """A rule that the value must not exceed another field's."""

    other: str


@dataclass(frozen=True)
class ReadBy:
    """A note that only some records read the value; in others it would have no effect."""

    switch: str
    """Setting that makes it be read, for messages; {name} stands for another field of the record."""

    reads: Callable[[Any], object]
    """Function that returns whether a record reads it."""


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
        """Make the message; `others` are the fields that `rule` mentions as {0}, {1}, ..."""
        self.name, self.value, self.rule, self.others = name, value, rule, others
        super().__init__(f"{name}={value}: {self.said(str)}")

    def said(self, spell: Callable[[str], str]) -> str:
        """Return the rule and the remedy, with other fields under the names that `spell` gives them."""
        return self.rule.format(*map(spell, self.others)) if self.others else self.rule


def notes_of(record: type) -> Mapping[str, tuple[Any, ...]]:
    """Return the annotations beside the type of every field."""
    return _notes_of(record)


@cache
def _notes_of(record: type) -> Mapping[str, tuple[Any, ...]]:
    hints = get_type_hints(record, include_extras=True)
    return {
        name: get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        for name, hint in hints.items()
    }


def broken_rule(value: object, notes: Sequence[Any]) -> str | None:
    """Return the message of the first rule among `notes` that the value breaks, if there is one."""
    for item in value if isinstance(value, tuple) else (value,):
        rules = [note for note in notes if isinstance(note, Rule)]
        if type(item) in _BY_KIND and not any(rule.says_the_largest for rule in rules):
            rules.append(_BY_KIND[type(item)])
        for rule in rules:
            if item is not None and not rule.holds(item):
                return rule.broken
    return None


def require_ranges(record: Any) -> None:
    """Raise FieldError for the first field whose value breaks its annotations."""
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


def require_choice(name: str, value: object, choices: Any) -> None:
    """Raise ValueError, listing the choices, unless `value` is one of the names of `choices`, a
    Literal."""
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r}: unknown. Use one of {', '.join(get_args(choices))}.")


def require_choices(config: object) -> None:
    """Check every field of a dataclass whose type is a Literal by `require_choice`; None passes where
    the type allows it."""
    config_class: Any = type(config)
    for name, hint, choices in _choices_of(config_class):
        value = getattr(config, name)
        if not (value is None and type(None) in get_args(hint)):
            require_choice(name, value, choices)


@cache
def _choices_of(config_class: type) -> tuple[tuple[str, Any, Any], ...]:
    """Return name, type and Literal of each field that has one."""
    return tuple(
        (name, hint, arm)
        for name, hint in get_type_hints(config_class).items()
        for arm in (hint, *get_args(hint))
        if get_origin(arm) is Literal
    )
