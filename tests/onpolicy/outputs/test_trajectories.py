"""The record of a trajectory."""

import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from onpolicy.grammar import Grammar, GrammarSpan
from onpolicy.outputs.trajectories import TrajectoryRecord, digest, read, write
from onpolicy.system.records import checked
from onpolicy.trajectory import FinishReason, Span, Trajectory

SHAPE = TypeAdapter(TrajectoryRecord)


GRAMMAR = GrammarSpan(
    grammar=Grammar(kind="regex", text="a|b", stop_token_ids=(1, 3)), start=1, end=3
)


@st.composite
def trajectories(draw):
    mask = [False, *draw(st.lists(st.booleans(), max_size=20))]
    count = sum(mask)
    log_probs = st.floats(width=32, max_value=0, allow_nan=False, allow_infinity=False)
    cut = draw(st.integers(0, count))
    ends = [end for end in (cut, count) if end] if cut != count else [count] if count else []
    experts = np.arange(2 * (len(mask) - 1), dtype=np.int32).reshape(-1, 2)
    return Trajectory(
        token_ids=draw(st.lists(st.integers(0, 2**17), min_size=len(mask), max_size=len(mask))),
        sampled=mask,
        rollout_log_probs=draw(st.lists(log_probs, min_size=count, max_size=count)),
        temperatures=draw(st.lists(st.floats(0.1, 2), min_size=count, max_size=count)),
        spans=tuple(
            Span(version=i, start=start, end=end)
            for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        ),
        routed_experts=draw(st.sampled_from([None, experts])),
        kept_tokens=draw(st.sampled_from([[], [b"", b"\x80\x01", b"\x05\0\0\0"] * 7]))[:count],
        entropy=draw(st.sampled_from([[], [0.0, 1.5, 0.1] * 7]))[:count],
        grammars=draw(st.sampled_from([(), (GRAMMAR,)])) if len(mask) > 2 else (),
        finish_reason=draw(st.sampled_from(FinishReason)),
        weight_version=3,
        num_cached_tokens=draw(st.integers(0, 9)),
        num_prefix_tokens=draw(st.integers(0, 9)),
        forks=draw(st.sampled_from([(), (("0", 1), ("a", 3))])),
    )


def fields_of(trajectory):
    values = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    experts = values.pop("routed_experts")
    return values, None if experts is None else experts.tolist(), str(values["rollout_log_probs"])


@given(trajectories())
def test_every_number_comes_back_to_the_bit_whatever_was_given_in_between(trajectory):
    record = json.loads(json.dumps(write(trajectory)))
    assert fields_of(read(checked(SHAPE, record))) == fields_of(trajectory)


WITHIN = {"kind": "regex", "text": "a", "stop_token_ids": [1], "start": 1, "end": 3}

EXAMPLE = Trajectory(
    token_ids=[2, 5, 6, 3, 7],
    sampled=[False, True, True, False, True],
    rollout_log_probs=[-1.0, -2.0, -3.0],
    temperatures=[1.0, 1.0, 0.5],
    spans=(Span(version=1, start=0, end=3),),
)


def test_a_record_says_which_stretches_were_sampled():
    assert write(EXAMPLE)["sampled"] == [[1, 3], [4, 5]]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"sampled": [[0, 2]]}, "sampled=[0, 2]: must start after 0 and end by 5"),
        ({"sampled": [[4, 6]]}, "sampled=[4, 6]: must start after 0 and end by 5"),
        ({"sampled": [[1, 2]]}, "sampled tokens are 1 and rollout_log_probs 3: a token has one"),
        ({"temperatures": [1.0]}, "sampled tokens are 3 and temperatures 1: a token has one"),
        (
            {"spans": [[1, 0, 4]]},
            "span=[1, 0, 4]: must be a version, a start and an end up to 3",
        ),
        ({"routed_experts": [4, 2, "AAAA"]}, "buffer size must be a multiple"),
        ({"kept_tokens": ["AAAA"]}, "sampled tokens are 3 and kept_tokens 1"),
        ({"kept_tokens": ["AAAA", 0, 1]}, "kept_tokens=1: 1 sets come before it"),
        ({"entropy": [1.0]}, "sampled tokens are 3 and entropy 1"),
        ({"grammars": [WITHIN | {"end": 6}]}, "grammars=[1, 6]: must start after 0"),
    ],
)
def test_what_nobody_has_sampled_is_refused(changes, fault):
    with pytest.raises(ValueError, match=re.escape(fault)):
        read({**write(EXAMPLE), **changes})


def test_a_kept_set_is_written_where_it_comes_first_and_held_once():
    kept = [b"\0\0\0", b"", bytes(3), b"\0\0\0\1", b""]
    trajectory = Trajectory(
        token_ids=[*range(6)],
        sampled=[False] + [True] * 5,
        rollout_log_probs=[-1.0] * 5,
        temperatures=[1.0] * 5,
        kept_tokens=kept,
    )
    record = write(trajectory)
    assert record["kept_tokens"] == ["AAAA", "", 0, "AAAAAQ==", 1]
    found = read(json.loads(json.dumps(record))).kept_tokens
    assert found == kept and found[0] is found[2]
    each = ["AAAA", "", "AAAA", "AAAAAQ==", ""]  # as earlier versions wrote them
    assert read({**record, "kept_tokens": each}).kept_tokens == kept


def test_a_record_of_before_tokens_before_answers_were_counted_is_read():
    record = write(dataclasses.replace(EXAMPLE, num_prefix_tokens=3))
    del record["num_prefix_tokens"]
    assert read(checked(SHAPE, record)).num_prefix_tokens == 0


def test_a_digest_is_that_of_the_sampled_tokens_and_their_log_probabilities():
    assert digest(EXAMPLE) == digest(dataclasses.replace(EXAMPLE, temperatures=[0.5] * 3))
    other = [-1.0, -2.0, float(np.nextafter(np.float32(-3), np.float32(0)))]
    assert digest(EXAMPLE) != digest(dataclasses.replace(EXAMPLE, rollout_log_probs=other))
    assert digest(EXAMPLE) != digest(dataclasses.replace(EXAMPLE, token_ids=[2, 5, 6, 3, 8]))
    assert digest(EXAMPLE) != digest(dataclasses.replace(EXAMPLE, kept_tokens=[b"", b"", b"\x80"]))
