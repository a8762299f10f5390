"""JSON with one place of another shape: what somebody edited, another version wrote, or an attacker."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

OTHERS = (None, True, -1, 1.5, "x", [], {}, [[]], {"x": 1}, 10**30)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything inside `value`, itself included."""
    yield path
    inside = value.items() if isinstance(value, dict) else ()
    inside = enumerate(value) if isinstance(value, list) else inside
    for key, each in inside:
        yield from places(each, (*path, key))


def is_another_shape(value: Any, other: Any) -> bool:
    """Whether no reader that knows types can take one for the other."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return isinstance(other, (bool, str, list, dict)) or other is None
    return other is True if value is None else type(value) is not type(other)


@st.composite
def changes(
    draw: st.DrawFn,
    record: dict[str, Any],
    kept: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
) -> dict[str, Any]:
    """`record` with a value of another type, a key that is gone, or one that nobody knows.

    What is below a key of `kept` stays: a mapping that may hold anything. Those of `optional` are not
    gone, since a record may lack them.
    """
    changed = copy.deepcopy(record)
    paths = [path for path in places(record) if path and not set(path[:-1]) & set(kept)]
    *above, key = draw(st.sampled_from(paths))
    parent = changed
    for step in above:
        parent = parent[step]
    if isinstance(parent, dict) and draw(st.booleans()):
        if key not in optional and draw(st.booleans()):
            del parent[key]
        else:
            parent["nobody knows"] = 1
    else:
        others = [other for other in OTHERS if is_another_shape(parent[key], other)]
        parent[key] = draw(st.sampled_from(others))
    return changed
