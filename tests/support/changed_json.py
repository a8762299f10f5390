"""JSON with one place of another shape: what somebody edited, another version wrote, or an attacker."""

import copy

from hypothesis import strategies as st

OTHERS = (None, True, -1, 1.5, "x", [], {}, [[]], {"x": 1}, 10**30)


def places(value, path=()):
    """The way to everything inside `value`, itself included."""
    yield path
    inside = value.items() if isinstance(value, dict) else ()
    inside = enumerate(value) if isinstance(value, list) else inside
    for key, each in inside:
        yield from places(each, (*path, key))


def is_another_shape(value, other):
    """Whether no reader that knows types can take one for the other."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return isinstance(other, (bool, str, list, dict)) or other is None
    return other is True if value is None else type(value) is not type(other)


def is_below(path, kept):
    return bool({*path[:-1], *(path[:length] for length in range(len(path)))} & {*kept})


@st.composite
def changes(draw, record, kept=(), optional=(), nullable=()):
    """`record` with a value of another type, a key that is gone, or one that nobody knows.

    What is below a key of `kept`, or the way to one, stays: a mapping that may hold anything. Those of
    `optional` are not gone, since a record may lack them. A value whose way begins and ends with a pair
    of `nullable` does not become null.
    """
    changed = copy.deepcopy(record)
    paths = [path for path in places(record) if path and not is_below(path, kept)]
    path = draw(st.sampled_from(paths))
    *above, key = path
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
        if (path[0], key) in nullable:
            others = [other for other in others if other is not None]
        parent[key] = draw(st.sampled_from(others))
    return changed
