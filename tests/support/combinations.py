"""Combinations of flags: a pairwise covering array over what decides training, made of the flags.

A flag that is added joins by its type: every value of a Literal, both of a bool, and numbers near its
default. A row is a set of values that are not the base's; which rows a run takes, its rules say.
"""

import random
import re
import types
import typing
from itertools import combinations
from typing import Literal

from fallback_correction.ranges import broken_rule
from onpolicy.config.flags import flag_values, flags_of
from onpolicy.config.rules import decides_results

NEAR = (lambda x: 2 * x, lambda x: x / 2, lambda x: x + 1, lambda x: 0.5, lambda x: 1, lambda x: 0)
WHERE_NONE = (2, 0.5, 4, 1)
DEEPEST = 5
"""Flags of the smallest row with a value."""


def _is_number(flag):
    return bool({int, float} & {flag.kind, *typing.get_args(flag.kind)})


def choices_of(flag, base):
    """The values that a flag is tried with, the base's first; of a text or several values no other."""
    kinds = [flag.kind]
    if typing.get_origin(flag.kind) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(flag.kind) if kind is not type(None)]
    (kind,) = kinds
    found = ()
    if typing.get_origin(kind) is Literal:
        found = typing.get_args(kind)
    elif kind is bool:
        found = (False, True)
    elif kind in (int, float):
        near = WHERE_NONE if base is None else [change(base) for change in NEAR]
        found = [kind(x) for x in near if kind(x) == x and broken_rule(kind(x), flag.notes) is None]
    if flag.kind is not kind:
        found = [None, *found]
    return [base, *(x for x in dict.fromkeys(found) if x != base)]


class Combinations:
    """`refusal`: what is said of a row that no run takes; None of one that is taken."""

    def __init__(self, base, refusal, outside, seed=0):
        self.base = flag_values(base)
        flags = [f for f in flags_of(type(base)) if decides_results(f) and not outside(f)]
        choices = {flag.name: choices_of(flag, self.base[flag.name]) for flag in flags}
        numbers = {flag.name for flag in flags if _is_number(flag)}
        self._ask, self._chance = refusal, random.Random(seed)
        self._asked = {}
        self.choices = {name: values for name, values in choices.items() if len(values) > 1}
        found = {(name, x): self._find_carrier({name: x}) for name, x in self.values}
        self.carriers = {item: row for item, row in found.items() if row is not None}
        for name in numbers & self.choices.keys():  # one number beside the base's will do
            base_value, *others = self.choices[name]
            taken = [x for x in others if (name, x) in self.carriers]
            self.choices[name] = [base_value, *(taken or others)[:1]]
            for value in taken[1:]:
                del self.carriers[name, value]
        """Of each value a small row that is taken with it."""

        self._left = {
            frozenset([(a, x), (b, y)])
            for a, b in combinations(self.choices, 2)
            for x in self.choices[a]
            for y in self.choices[b]
            if self._can(a, x) and self._can(b, y)
        }

    @property
    def refusals(self):
        """The rows that were asked for and are refused, and what is said of them."""
        return {row: error for row, error in self._asked.items() if error is not None}

    @property
    def values(self):
        return [(name, x) for name, values in self.choices.items() for x in values[1:]]

    def _can(self, name, value):
        return value == self.base[name] or (name, value) in self.carriers

    def _refusal(self, row):
        key = frozenset(item for item in row.items() if item[1] != self.base[item[0]])
        if key not in self._asked:
            self._asked[key] = self._ask(dict(key))
        return self._asked[key]

    def _is_taken(self, row):
        return self._refusal(row) is None

    def _find_carrier(self, row):
        """Breadth first: as a user does who changes what the refusal names."""
        rows = [row]
        for _ in range(DEEPEST):
            for row in rows:
                if self._is_taken(row):
                    return row
            rows = [more for row in rows for more in self._mended(row)]
        return None

    def _mended(self, row):
        named = re.findall(r"--([a-z][a-z0-9-]*[a-z0-9])", str(self._refusal(row)))
        for name in dict.fromkeys(word.replace("-", "_").removeprefix("no_") for word in named):
            for value in self.choices.get(name, ()):
                if name not in row and value != self.base[name]:
                    yield {**row, name: value}

    def rows(self):
        """Rows that runs take, until each pair of values is in one of them, or in none that was found.

        Those with values that are in no row yet come first.
        """
        met = set()
        while self._left:
            row = self._next_row(met)
            if row is None:
                continue
            full = {name: row.get(name, self.base[name]) for name in self.choices}
            met |= full.items()
            self._left -= {frozenset(pair) for pair in combinations(full.items(), 2)}
            yield {name: x for name, x in row.items() if x != self.base[name]}

    def _next_row(self, met):
        seeds = [item for item in self.carriers if item not in met]
        if seeds:
            row = dict(self.carriers[self._chance.choice(seeds)])
        else:
            pair = self._chance.choice(sorted(self._left, key=lambda p: sorted(map(repr, p))))
            rows = self._with_both(*sorted(pair, key=repr))
            if (start := next(filter(self._is_taken, rows), None)) is None:
                self._left.discard(pair)
                return None
            row = dict(start)
        names = [name for name in self.choices if name not in row]
        self._chance.shuffle(names)
        for name in names:
            if name not in row:
                row = self._with_most(row, name)
        return row

    def _with_both(self, a, b):
        first, second = self.carriers.get(a, {}), self.carriers.get(b, {})
        pair = dict([a, b])
        yield {**first, **second, **pair}
        yield {**second, **first, **pair}

    def _with_most(self, row, name):
        """The row with the value of a flag that brings the most pairs which are left, if it is taken."""

        def gain(value):
            return sum(frozenset([(name, value), item]) in self._left for item in row.items())

        gains = {x: gain(x) for x in self.choices[name]}
        for value in sorted(gains, key=lambda x: -gains[x]):
            carrier = self.carriers.get((name, value), {name: value})
            more = {**carrier, **row, name: value}
            if gains[value] and self._is_taken(more):
                return more
        return row
