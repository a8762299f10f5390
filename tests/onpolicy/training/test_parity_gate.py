"""The gate before a backward pass, on ranks that are threads with torch's own collectives."""

import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.errors import ParityError
from onpolicy.training.batch import packed_batch
from onpolicy.training.learner import with_draws
from onpolicy.training.parity_gate import ParityGate
from onpolicy.training.shares import Outcomes, SampledTokens, make_shares
from onpolicy.trajectory import Span
from tests.support.ranks import on_ranks
from tests.support.samples import make_train_sample, with_trajectory

LENGTHS = [3, 1, 4, 2, 5]
NUM_TOKENS = sum(LENGTHS)


def float32(value):
    return torch.tensor(value).item()


ROLLOUT = [
    [float32(-0.1 * (i + 1) - 0.01 * position) for position in range(length)]
    for i, length in enumerate(LENGTHS)
]


def make_samples(rollout=ROLLOUT):
    return [
        make_train_sample([2] * (1 + len(log_probs)), 1, log_probs, reward=0.0, index=i)
        for i, log_probs in enumerate(rollout)
    ]


def changed(values, sample, position, value):
    """The log-probabilities of all samples, one of them with another value."""
    values = [list(row) for row in values]
    values[sample][position] = value
    return values


def neighbour(value):
    return torch.nextafter(torch.tensor(value), torch.tensor(-math.inf)).item()


def check_on(num_ranks, train, rollout=ROLLOUT, *, max_tokens=5, on_mismatch="fail"):
    """What each rank has of a gate: (counts of all, mismatched tokens by sample, error or None)."""

    def check(rank):
        samples = make_samples(rollout)
        gate = ParityGate(7, on_mismatch, "Look at it.")
        row_of = {id(sample): row for sample, row in zip(samples, train, strict=True)}
        error = None
        share = make_shares(samples, 1, num_ranks, max_tokens)[rank]
        try:
            for part in share[0]:
                batch = packed_batch(part, torch.device("cpu"))
                junk = [math.nan] * len(batch.rollout_log_probs)
                rows = [junk] if batch.is_filler else [row_of[id(s)] for s in batch.samples]
                log_probs = [x for row in rows for x in row]
                gate.check(torch.tensor(log_probs, requires_grad=True), batch)
        except ParityError as refused:
            error = str(refused)
        return gate.reduce(), gate.findings(len(samples), None).mismatched_tokens, error

    return on_ranks(num_ranks, check)


RANKS = st.integers(1, 7)
BUDGETS = st.sampled_from([2, 5, 8, 100])
TOKENS = st.sampled_from([(i, p) for i, n in enumerate(LENGTHS) for p in range(n)])


@given(RANKS, BUDGETS)
def test_the_same_bits_pass_on_any_number_of_ranks_and_fillers_do_not_count(ranks, max_tokens):
    """With more ranks than samples; what a filler scores is not even a number here."""
    for counts, by_sample, error in check_on(ranks, ROLLOUT, max_tokens=max_tokens):
        assert error is None
        assert (counts.num_compared, counts.num_mismatched) == (NUM_TOKENS, 0)
        assert by_sample == [0] * len(LENGTHS)


@given(RANKS, BUDGETS, TOKENS)
def test_one_bit_of_one_token_fails_on_every_rank_and_is_named(ranks, max_tokens, token):
    i, position = token
    rollout, train = ROLLOUT[i][position], neighbour(ROLLOUT[i][position])
    outcomes = check_on(ranks, changed(ROLLOUT, i, position, train), max_tokens=max_tokens)
    (error,) = {error for _, _, error in outcomes}
    assert error.startswith("1 of ")
    assert error.endswith(
        " tokens have another log-probability in training than in the rollout. First: step=7, "
        f"prompt {i}, sample 0, response position={position}: rollout={rollout!r}, train={train!r}, "
        "ulp=1. No step was taken. Look at it."
    )
    for counts, by_sample, _ in outcomes:
        assert counts.num_mismatched == 1 and by_sample[i] == 1
        assert all(not count for j, count in enumerate(by_sample) if j != i)


@pytest.mark.parametrize(
    ("train", "rollout", "ulp"),
    [
        (-0.0, 0.0, 0), (0.0, -0.0, 0), (-0.0, -0.0, None), (-0.5, -0.5, None),
        (-0.5, neighbour(-0.5), 1), (-1e-45, 0.0, 1), (math.nan, -0.5, 1 << 31),
        (-0.5, math.nan, 1 << 31), (math.nan, math.nan, 1 << 31), (-math.inf, -math.inf, 1 << 31),
        (math.inf, math.inf, 1 << 31),
    ],
)  # fmt: skip
def test_values_are_the_same_if_they_are_the_same_bits_of_a_finite_number(train, rollout, ulp):
    """There are two zeros; what is not finite never is the same, even if both sides have it."""
    outcomes = check_on(2, changed(ROLLOUT, 3, 1, train), changed(ROLLOUT, 3, 1, rollout))
    for counts, _, error in outcomes:
        assert counts.num_mismatched == (ulp is not None)
        assert counts.max_ulp == (ulp or 0)
        assert (error is not None) == (ulp is not None)
        assert error is None or "prompt 3, sample 0, response position=1:" in error


@given(
    RANKS,
    BUDGETS,
    st.lists(st.sets(st.integers(0, 4)), min_size=len(LENGTHS), max_size=len(LENGTHS)),
)
def test_a_gate_that_does_not_fail_counts_every_sample_of_every_rank(ranks, max_tokens, differ):
    train = [
        [neighbour(x) if position in wrong else x for position, x in enumerate(row)]
        for row, wrong in zip(ROLLOUT, differ, strict=True)
    ]
    expected = [
        sum(position < length for position in wrong)
        for length, wrong in zip(LENGTHS, differ, strict=True)
    ]
    for counts, by_sample, error in check_on(
        ranks, train, max_tokens=max_tokens, on_mismatch="measure"
    ):
        assert error is None and by_sample == expected
        assert (counts.num_compared, counts.num_mismatched) == (NUM_TOKENS, sum(expected))


def test_what_comes_after_the_micro_batch_that_failed_was_not_compared():
    wrong = changed(ROLLOUT, 4, 0, -9.0)  # of the longest sample, which comes first
    ((counts, by_sample, error),) = check_on(1, wrong, max_tokens=6)
    assert error.startswith("1 of 5 tokens")
    assert by_sample == [None, None, None, None, 1]
    assert counts.num_compared == LENGTHS[4]


@pytest.mark.parametrize(("policy", "said"), [("warn", 1), ("measure", 0)])
def test_a_gate_that_warns_says_how_many_tokens_differ_and_goes_on(caplog, policy, said):
    wrong = changed(ROLLOUT, 0, 1, -9.0)
    ((_, _, error),) = check_on(1, wrong, on_mismatch=policy)
    message = f"step 7: 1 of {NUM_TOKENS} tokens have another log-probability in training"
    assert error is None and caplog.messages.count(message) == said
    caplog.clear()
    check_on(1, ROLLOUT, on_mismatch=policy)
    assert not caplog.messages


def test_only_tokens_of_the_policy_that_learns_are_compared():
    """Those of earlier weights may have any log-probability."""
    spans = (Span(version=1, start=0, end=2), Span(version=3, start=2, end=5))
    samples = [
        lagging(make_samples()[0], (Span(version=2, start=0, end=3),)),
        lagging(make_samples()[4], spans),
    ]
    assert Outcomes.of(samples, 1).lags == (0, 1, 2)
    old = [x - 0.5 for x in ROLLOUT[0] + ROLLOUT[4][:2]]

    def check(train):
        gate = ParityGate(3, "fail", "Look at it.")
        batch = packed_batch(dict(enumerate(samples)), torch.device("cpu"))
        gate.check(torch.tensor(train), batch)
        return gate.findings(len(samples), None).mismatched_tokens, gate.reduce().num_compared

    off = [*old, ROLLOUT[4][2], neighbour(ROLLOUT[4][3]), ROLLOUT[4][4]]
    (same,) = on_ranks(1, lambda rank: check([*old, *ROLLOUT[4][2:]]))
    (error,) = on_ranks(1, lambda rank: check(off))
    assert same == ([None, 0], 3)
    assert re.match(r"1 of 3 tokens.*response position=3", str(error))


def lagging(trained, spans):
    return dataclasses.replace(with_trajectory(trained, spans=spans), policy_version=3)


SAMPLED = SampledTokens(all=NUM_TOKENS, older=0, later=0)
ROWS = {"missing": lambda x: x[:-1], "twice": lambda x: torch.cat([x, x[-1:]])}


def gate_on(num_ranks, look, *, max_tokens=5, on_mismatch="fail", expected=SAMPLED, seeds=True):
    """What each rank has of a gate that expects all tokens: (redrawn, drawn otherwise, error or None).

    look: (batch, log-probabilities, tokens drawn again) -> what the trainer says of both.
    """

    def check(rank):
        samples = make_samples()
        for i, sample in enumerate(samples if seeds else ()):
            sample.seeds = [(100 + i, LENGTHS[i])]
        gate, error = ParityGate(7, on_mismatch, "Look at it.", expected), None
        share = make_shares(samples, 1, num_ranks, max_tokens)[rank]
        try:
            for part in share[0]:
                batch = with_draws(packed_batch(part, torch.device("cpu")))
                drawn = batch.packed.targets.float()
                drawn[~batch.packed.draws.chosen] = math.nan
                log_probs, drawn = look(batch, batch.rollout_log_probs.clone(), drawn)
                gate.check(log_probs, batch, drawn)
            gate.require_all()
        except ParityError as refused:
            error = refused
        counts = gate.reduce()
        return counts.num_redrawn, counts.num_drawn_otherwise, error

    return on_ranks(num_ranks, check)


def as_it_is(batch, log_probs, drawn):
    return log_probs, drawn


@given(RANKS, BUDGETS)
def test_what_is_drawn_again_alike_passes_on_any_number_of_ranks(ranks, max_tokens):
    for found in gate_on(ranks, as_it_is, max_tokens=max_tokens):
        assert found == (NUM_TOKENS, 0, None)
    for found in gate_on(ranks, as_it_is, max_tokens=max_tokens, seeds=False):
        assert found == (0, 0, None)


@given(RANKS, BUDGETS, TOKENS)
def test_one_token_that_is_drawn_otherwise_fails_on_every_rank_and_is_named(
    ranks, max_tokens, token
):
    i, position = token

    def otherwise(batch, log_probs, drawn):
        for row in range(len(drawn)):
            sample, place = batch.locate(row)
            if (sample.group, place) == token:
                drawn[row] = 77
        return log_probs, drawn

    outcomes = gate_on(ranks, otherwise, max_tokens=max_tokens)
    (message,) = {str(error) for _, _, error in outcomes}
    assert message.startswith("1 of ") and not any(e.is_correctable for _, _, e in outcomes)
    assert (
        f"First: step=7, prompt {i}, sample 0, response position={position}: rollout=2, train=77, "
        f"sampling_seed={100 + i}, position={position}. No step was taken."
    ) in message


@pytest.mark.parametrize("side", [0, 1], ids=["log_probs", "drawn"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=[*ROWS])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_token_that_the_trainer_forgets_or_has_twice_ends_the_run_on_every_rank_in_our_words(
    ranks, rows, side
):
    def changed(batch, *said):
        said = list(said)
        if batch.numbers and 3 in batch.numbers:
            said[side] = rows(said[side])
        return said

    for _, _, error in gate_on(ranks, changed):
        assert re.search(
            r"^step=7: what the trainer says .* is off by 1 tokens: it must", str(error)
        )
        assert not error.is_correctable


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_token_that_was_not_drawn_again_though_it_was_to_be_ends_the_run(ranks):
    def lazy(batch, log_probs, drawn):
        if 3 in batch.numbers:
            drawn[0] = math.nan
        return log_probs, drawn

    for _, _, error in gate_on(ranks, lazy):
        assert "is off by 1 tokens" in str(error)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_comparison_that_leaves_out_a_token_ends_the_run_before_its_step(ranks, monkeypatch):
    """As if it were of earlier weights, in a schedule in which none are."""

    def one_older(part, *more, make=packed_batch):
        batch = make(part, *more)
        if 2 in batch.numbers:
            batch.lags[0] = 1
        return batch

    monkeypatch.setitem(globals(), "packed_batch", one_older)
    for _, _, error in gate_on(ranks, as_it_is):
        assert f"step=7: {NUM_TOKENS - 1} tokens were compared" in str(error)
        assert f"{NUM_TOKENS} were sampled, of which 0 come from earlier weights" in str(error)


@pytest.mark.parametrize("left_out", [0, 4])
def test_a_micro_batch_that_nobody_compares_ends_the_run(left_out, monkeypatch):
    check = ParityGate.check

    def lazy(gate, log_probs, batch, *more):
        if left_out not in batch.numbers:
            check(gate, log_probs, batch, *more)

    monkeypatch.setattr(ParityGate, "check", lazy)
    ((_, _, error),) = gate_on(1, as_it_is)
    assert "tokens were compared with the rollout" in str(error)


@pytest.mark.parametrize(
    "expected",
    [
        SampledTokens(all=NUM_TOKENS + 1, older=0, later=0),
        SampledTokens(all=NUM_TOKENS, older=1, later=0),
        SampledTokens(all=NUM_TOKENS, older=0, later=1),
    ],
)
def test_more_or_fewer_compared_than_there_are_ends_the_run(expected):
    ((_, _, error),) = gate_on(1, as_it_is, expected=expected)
    assert f"{NUM_TOKENS} tokens were compared with the rollout, and {expected.all} were" in str(
        error
    )
    allowed = SampledTokens(all=NUM_TOKENS + 5, older=2, later=3)
    assert gate_on(1, as_it_is, expected=allowed)[0][2] is None


@pytest.mark.parametrize("forgets", [lambda rows: None, *ROWS.values()], ids=["all", *ROWS])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_row_that_the_trainer_forgets_or_has_twice_ends_the_run_on_every_rank(ranks, forgets):
    def check(rank, changed):
        gate = ParityGate(7, "fail", "Look at it.", SAMPLED, compares_rows=True)
        for part in make_shares(with_digests(), 1, ranks, 5)[rank][0]:
            batch = packed_batch(part, torch.device("cpu"))
            rows = changed(batch.rollout_digests) if 3 in batch.numbers else batch.rollout_digests
            gate.check(batch.rollout_log_probs, batch, None, rows)
        gate.require_all()
        return gate.metrics()

    for metrics in on_ranks(ranks, lambda rank: check(rank, lambda rows: rows)):
        assert metrics["parity/num_compared_rows"] == NUM_TOKENS
        assert metrics["parity/num_mismatched_rows"] == 0
    for error in on_ranks(ranks, lambda rank: refusal(check, rank, forgets)):
        assert "what the trainer says of a micro-batch is off by" in str(error)
        assert not error.is_correctable


def with_digests():
    return [
        with_trajectory(sample, row_digests=[100 * i + n + 1 for n in range(length)])
        for i, (sample, length) in enumerate(zip(make_samples(), LENGTHS, strict=True))
    ]


@given(RANKS, BUDGETS, TOKENS)
def test_one_row_that_differs_fails_on_every_rank_and_is_named(ranks, max_tokens, token):
    i, position = token

    def check(rank):
        gate = ParityGate(7, "fail", "Look at it.", SAMPLED, compares_rows=True)
        for part in make_shares(with_digests(), 1, ranks, max_tokens)[rank][0]:
            batch = packed_batch(part, torch.device("cpu"))
            rows = batch.rollout_digests.clone()
            rows[rows == 100 * i + position + 1] = -1
            gate.check(batch.rollout_log_probs, batch, None, rows)

    for error in on_ranks(ranks, lambda rank: refusal(check, rank)):
        assert str(error).startswith("1 of ") and error.is_correctable
        assert (
            f"First: step=7, prompt {i}, sample 0, response position={position}: token=2, "
            f"rollout={100 * i + position + 1:016x}, train={'f' * 16} "
        ) in str(error)


def test_nothing_sampled_is_nothing_compared_and_ends_the_run():
    def check(rank):
        gate = ParityGate(7, "fail", "", SampledTokens(all=0, older=0, later=0))
        gate.require_all()

    (error,) = on_ranks(1, lambda rank: refusal(check, rank))
    assert "0 tokens were compared with the rollout, and 0 were sampled" in str(error)


def refusal(call, *args):
    try:
        call(*args)
    except ParityError as error:
        return error
    return None
