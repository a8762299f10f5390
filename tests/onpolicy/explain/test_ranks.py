"""Rows that the tensor-parallel ranks of a rollout kept are put together as a whole trainer's."""

import pytest
import torch

from onpolicy.explain.ranks import joined, rows_by_rank
from onpolicy.explain.taps.points import Kept, kept_rows
from onpolicy.explain.taps.recorder import HEAD, Recorder
from onpolicy.models.policy import PackedTokens
from onpolicy.ops.cpu import CpuOperators
from tests.onpolicy.models.test_policy import random_sequences
from tests.support import faults
from tests.support.recorded_policies import recording, replace_in
from tests.support.sharded_policies import RANKS, load_in_blocks, record_ranks
from tests.support.tiny import make_checkpoint

SEQUENCES = random_sequences([30, 9, 3])
NORM = (("layers.0.input_layernorm", "rms_norm", 0), "made")
QUERIES = (("layers.0.self_attn.q_proj", "linear", 0), "made")


def rows_of_ranks(path, break_=lambda rank, policy: CpuOperators(1)):
    recorders = [Recorder(rank, keeps_rows=True) for rank in range(RANKS)]
    passes = []
    record_ranks(path, SEQUENCES, break_, recorders=recorders, passes=passes)
    return rows_by_rank(passes)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "model", "qwen3")


@pytest.fixture(scope="module")
def whole(path):
    policy = load_in_blocks(path)
    with recording(policy, Recorder(keeps_rows=True)) as passes, torch.no_grad():
        policy(PackedTokens.after_prompts(SEQUENCES, [1] * len(SEQUENCES), 0.7))
    return kept_rows(passes)


@pytest.fixture(scope="module")
def ranks(path):
    return rows_of_ranks(path)


def other_rows(rows, whole):
    """Points of which some row is not that of `whole`."""
    found = set()
    for point, kept in rows.items():
        where, is_there = whole[point].find(kept.keys)
        equal = zip(kept.rows, whole[point].rows, strict=True)
        if not (is_there.all() and all(torch.equal(x, y[where]) for x, y in equal)):
            found.add(point)
    return found


def test_the_rows_of_aligned_ranks_together_are_the_trainers(ranks, whole):
    rows, differ = joined(ranks, whole)
    assert list(rows) == list(whole) and differ == []
    assert other_rows(rows, whole) == set()
    cut = {
        point for point in whole if ranks[0][point].rows[0].shape[1] < whole[point].rows[0].shape[1]
    }
    assert {QUERIES, ((HEAD, "linear", 0), "made")} < cut and len(cut) < len(whole)
    swapped, _ = joined(ranks[::-1], whole)
    assert other_rows(swapped, whole) == cut


def test_one_rank_has_all_rows_as_they_are(whole):
    assert joined([whole], {}) == (whole, [])


def test_a_rank_that_made_other_rows_is_said_and_the_first_ranks_are_taken(
    path, whole, monkeypatch
):
    def break_(rank, policy):
        if rank == 1:
            replace_in(monkeypatch, policy, NORM[0][0], "rms_norm", faults.one_ulp_in_three_rows)
        return CpuOperators(1)

    ranks = rows_of_ranks(path, break_)
    rows, differ = joined(ranks, whole)
    assert differ[0] == NORM
    assert torch.equal(rows[NORM].rows[0], ranks[0][NORM].rows[0])


def test_what_is_no_part_of_whole_rows_is_left_out(ranks, whole):
    right = ranks[1][QUERIES]
    narrow = Kept(right.keys, [rows[:, :-1] for rows in right.rows])
    lacking = {point: kept for point, kept in ranks[1].items() if point != QUERIES}
    for other in ({**ranks[1], QUERIES: narrow}, lacking):
        rows, _ = joined([{**ranks[0]}, other], whole)
        assert whole.keys() - rows.keys() == {QUERIES}
