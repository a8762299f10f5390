"""Trajectories that grow by answers, and their records."""

import dataclasses
import json
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.outputs.recorded_order import digest
from onpolicy.system.records import Shape
from onpolicy.trajectory import FinishReason, Grammar, GrammarSpan, Span, Trajectory
from tests.support.samples import make_completion

EMPTY = Trajectory.begin([2, 3])


def of_version(version, length):
    spans = (Span(version=version, start=0, end=length),)
    return make_completion(range(5, 5 + length), [-1.0] * length, spans=spans)


def test_a_prompt_has_no_sampled_token_and_goes_on():
    assert EMPTY.sampled == [False, False]
    assert (EMPTY.prompt_ids, EMPTY.response_ids, EMPTY.num_sampled) == ([2, 3], [], 0)
    assert EMPTY.finish_reason == FinishReason.ABORT


def test_an_answer_is_sampled_after_what_was_given():
    answered = EMPTY.plus(make_completion([5, 6], [-1.0, -2.0], num_cached_tokens=1), 0.7)
    more = answered.plus(make_completion([7], [-3.0], num_cached_tokens=4, weight_version=3), 0.7)
    assert more.token_ids == [2, 3, 5, 6, 7]
    assert more.sampled == [False, False, True, True, True]
    assert (more.prompt_ids, more.response_ids) == ([2, 3], [5, 6, 7])
    assert more.rollout_log_probs == [-1.0, -2.0, -3.0]
    assert (more.num_cached_tokens, more.weight_version) == (5, 3)
    assert more.num_prefix_tokens == 2 + 4, "what each of the two requests began with"
    assert answered.num_sampled == 2, "the one before is as it was"


def test_a_long_trajectory_is_held_and_sent_in_arrays():
    """Lists of them held 50 GB in a gateway (rllm-org/rllm#787)."""
    trajectory = EMPTY
    for turn in range(64):
        trajectory = trajectory.given([turn] * 64).plus(
            make_completion(range(64), np.linspace(-9, 0, 64, dtype=np.float32)), 0.7
        )
    fields = ("token_ids", "sampled", "rollout_log_probs", "temperatures")
    held = sum(getattr(trajectory, name).array.base.nbytes for name in fields)
    assert held <= 20 * len(trajectory.token_ids)
    sent = pickle.dumps(trajectory)
    assert len(sent) <= 10 * len(trajectory.token_ids)
    assert pickle.loads(sent) == trajectory


def test_stretches_of_one_version_are_one():
    same = EMPTY.plus(of_version(3, 2), 0.7).plus(of_version(3, 1), 0.7)
    assert same.spans == (Span(version=3, start=0, end=3),)
    assert same.plus(of_version(4, 1), 0.7).spans == (
        Span(version=3, start=0, end=3),
        Span(version=4, start=3, end=4),
    )


def test_the_experts_of_a_token_are_those_of_its_own_stretch():
    """A prompt of 2 tokens, and responses of 3 and 2: rows for all tokens but the last."""
    early = np.full((4, 2), 1, dtype=np.int32)
    late = np.full((6, 2), 9, dtype=np.int32)
    first = make_completion([5, 6, 7], [-1.0] * 3, routed_experts=early)
    more = make_completion([8, 9], [-1.0] * 2, routed_experts=late)
    assert EMPTY.plus(first, 0.7).plus(more, 0.7).routed_experts[:, 0].tolist() == [
        1, 1, 1, 1, 9, 9,
    ]  # fmt: skip
    lost = dataclasses.replace(first, routed_experts=None)
    assert EMPTY.plus(lost, 0.7).plus(more, 0.7).routed_experts is None
    unknown = dataclasses.replace(more, routed_experts=None)
    assert EMPTY.plus(first, 0.7).plus(unknown, 0.7).routed_experts is None


def test_what_tokens_were_drawn_from_goes_with_them():
    """Of a turn without filters that is the whole vocabulary: no bytes."""
    plain = EMPTY.plus(of_version(3, 2), 0.7)
    assert plain.kept_tokens == []
    answer = dataclasses.replace(of_version(3, 3), kept_tokens=[b"a", b"b", b"c"])
    grown = plain.plus(answer, 0.7).given([4]).plus(of_version(3, 1), 0.7)
    assert grown.kept_tokens == [b"", b"", b"a", b"b", b"c", b""]
    assert grown.until(6).kept_tokens == [b"", b"", b"a", b"b"]
    assert grown.as_given(5).kept_tokens == [b"b", b"c", b""]
    assert answer.until(2, FinishReason.ABORT).kept_tokens == [b"a", b"b"]


def test_digests_of_rows_go_with_their_tokens():
    """Through turns, forks, interruptions, and answers of an engine that gives none."""
    plain = EMPTY.plus(of_version(3, 2), 0.7)
    assert plain.row_digests == []
    answer = dataclasses.replace(of_version(3, 3), row_digests=[-5, 6, 7])
    grown = plain.plus(answer, 0.7).given([4]).plus(of_version(3, 1), 0.7)
    assert grown.row_digests == [0, 0, -5, 6, 7, 0]
    assert grown.until(6).row_digests == grown.forked(6, "0").row_digests == [0, 0, -5, 6]
    assert grown.as_given(5).row_digests == [6, 7, 0]
    assert answer.until(2, FinishReason.ABORT).row_digests == [-5, 6]
    rest = dataclasses.replace(of_version(3, 1), row_digests=[7])
    resumed = plain.plus(answer.until(2, FinishReason.ABORT), 0.7).plus(rest, 0.7)
    assert resumed.row_digests == [0, 0, -5, 6, 7]


SHAPE = Shape(Trajectory)


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
        row_digests=draw(st.sampled_from([[], [0, -(1 << 63), (1 << 63) - 1] * 7]))[:count],
        grammars=draw(st.sampled_from([(), (GRAMMAR,)])) if len(mask) > 2 else (),
        finish_reason=draw(st.sampled_from(FinishReason)),
        weight_version=3,
        num_cached_tokens=draw(st.integers(0, 9)),
        num_prefix_tokens=draw(st.integers(0, 9)),
        forks=draw(st.sampled_from([(), (("0", 1), ("a", 3))])),
        answers=draw(st.sampled_from([(), ((len(mask), FinishReason.STOP),)])),
    )


def fields_of(trajectory):
    values = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    experts = values.pop("routed_experts")
    return values, None if experts is None else experts.tolist(), str(values["rollout_log_probs"])


@given(trajectories())
def test_every_number_comes_back_to_the_bit_whatever_was_given_in_between(trajectory):
    assert fields_of(SHAPE.read(SHAPE.write(trajectory))) == fields_of(trajectory)


def record_of(trajectory):
    return json.loads(SHAPE.write(trajectory))


WITHIN = {"grammar": {"kind": "regex", "text": "a", "stop_token_ids": [1]}, "start": 1, "end": 3}

EXAMPLE = Trajectory(
    token_ids=[2, 5, 6, 3, 7],
    sampled=[False, True, True, False, True],
    rollout_log_probs=[-1.0, -2.0, -3.0],
    temperatures=[1.0, 1.0, 0.5],
    spans=(Span(version=1, start=0, end=3),),
)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"sampled": [True, False, True, False, True]}, "must be 5, the first given"),
        ({"sampled": [False, True, True, False]}, "must be 5, the first given"),
        ({"sampled": [False, True, False, False, False]}, "tokens are 1 and rollout_log_probs 3"),
        ({"temperatures": [1.0]}, "sampled tokens are 3 and temperatures 1: a token has one"),
        ({"temperatures": [1.0, 0.0, 1.0]}, "temperatures.1=0.0: should be greater than 0"),
        ({"token_ids": [2, 5, 6, 3, -1]}, "token_ids.4=-1: should be greater than or equal to 0"),
        ({"token_ids": [2, 5, 6, 3, 1 << 31]}, "token_ids.4=2147483648: should be less than"),
        ({"rollout_log_probs": [-0.1, 0.0, 0.0]}, "rollout_log_probs: [-0.1, 0.0, 0.0]: must be"),
        ({"rollout_log_probs": [-1e300, 0.0, 0.0]}, "must be numbers of float32"),
        ({"weight_version": -2}, "weight_version=-2: should be greater than or equal to -1"),
        ({"spans": [{"version": 1, "start": 0, "end": 4}]}, "must end after it starts, by 3"),
        ({"spans": [{"version": 1, "start": 2, "end": 1}]}, "must end after it starts, by 3"),
        ({"spans": [{"version": 1, "start": 0, "end": "3"}]}, "spans.0.end='3': should be a valid"),
        ({"spans": [[1, 0, 3]]}, "spans.0=[1, 0, 3]: should be a dictionary"),
        ({"finish_reason": "bored"}, "finish_reason='bored': should be"),
        ({"routed_experts": [4, 2, "AAAA"]}, "routed_experts: buffer size must be a multiple"),
        ({"routed_experts": [4, 2, "AAAAAA=="]}, "routed_experts: cannot reshape array"),
        ({"routed_experts": [4, 2, "!"]}, "routed_experts: Only base64 data"),
        ({"kept_tokens": ["AAAA"]}, "sampled tokens are 3 and kept_tokens 1"),
        ({"row_digests": [7]}, "sampled tokens are 3 and row_digests 1"),
        ({"kept_tokens": ["AAAA", 0, 1]}, "kept_tokens=1: 1 sets come before it"),
        ({"grammars": [WITHIN | {"end": 6}]}, "grammars=[(1, 6)]: each must start after 0"),
        ({"answers": [[3, "stop"], [2, "stop"]]}, "answers=[3, 2]: must be ends of answers"),
        ({"answers": [[6, "stop"]]}, "answers=[6]: must be ends of answers"),
        ({"times": [[6, 0.5, 1.0]]}, "times=((6, 0.5, 1.0),): must be of answers that end by 5"),
        ({"unknown": 1}, "unknown=1: Unexpected keyword argument"),
    ],
)
def test_what_nobody_has_sampled_is_refused(changes, fault):
    with pytest.raises(ValueError, match=re.escape(fault)):
        SHAPE.take({**record_of(EXAMPLE), **changes})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Trajectory)])
def test_a_record_has_every_field(field):
    record = record_of(EXAMPLE)
    del record[field]
    with pytest.raises(ValueError, match=f"^holds no {field}$"):
        SHAPE.take(record)


def test_a_kept_set_is_written_where_it_comes_first_and_held_once():
    kept = [b"\0\0\0", b"", bytes(3), b"\0\0\0\1", b""]
    trajectory = Trajectory(
        token_ids=[*range(6)],
        sampled=[False] + [True] * 5,
        rollout_log_probs=[-1.0] * 5,
        temperatures=[1.0] * 5,
        kept_tokens=kept,
    )
    record = record_of(trajectory)
    assert record["kept_tokens"] == ["AAAA", "", 0, "AAAAAQ==", 1]
    found = SHAPE.take(record).kept_tokens
    assert found == kept and found[0] is found[2]


def test_a_digest_is_that_of_the_sampled_tokens_and_their_log_probabilities():
    assert digest(EXAMPLE) == digest(dataclasses.replace(EXAMPLE, temperatures=[0.5] * 3))
    other = [-1.0, -2.0, float(np.nextafter(np.float32(-3), np.float32(0)))]
    assert digest(EXAMPLE) != digest(dataclasses.replace(EXAMPLE, rollout_log_probs=other))
    assert digest(EXAMPLE) != digest(dataclasses.replace(EXAMPLE, token_ids=[2, 5, 6, 3, 8]))
    assert digest(EXAMPLE) != digest(dataclasses.replace(EXAMPLE, kept_tokens=[b"", b"", b"\x80"]))
