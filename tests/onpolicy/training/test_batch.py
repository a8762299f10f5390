import pickle

import pytest
import torch

from onpolicy.training.batch import packed_batch
from tests.support.onpolicy_batches import make_micro_batches
from tests.support.samples import make_train_sample, with_trajectory

SAMPLES = [
    with_trajectory(
        make_train_sample(
            range(10 * i, 10 * i + prompt + response), prompt, [-float(i)] * response, float(i), i
        ),
        temperatures=[0.7 + i + 0.1 * t for t in range(response)],
    )
    for i, (prompt, response) in enumerate([(2, 3), (1, 1), (4, 2), (3, 4)])
]


def micro_batches(rank=0, num_ranks=1, max_tokens=8):
    return make_micro_batches(SAMPLES, rank=rank, num_ranks=num_ranks, max_tokens=max_tokens)


def test_targets_are_the_response_tokens_and_rows_the_ones_before_them():
    for batch in micro_batches():
        expected = [t for s in batch.samples for t in s.response_ids]
        assert batch.packed.targets.tolist() == expected
        assert (batch.packed.tokens[batch.packed.rows] == batch.packed.targets - 1).all()
        temperatures = [x for s in batch.samples for x in s.trajectory.temperatures]
        assert torch.equal(batch.packed.temperature, torch.tensor(temperatures))


def test_positions_restart_with_every_sequence():
    (batch,) = micro_batches(max_tokens=100)
    assert batch.packed.positions.tolist() == [
        p for s in batch.samples for p in range(len(s.token_ids))
    ]


def test_values_stand_beside_their_tokens():
    for batch in micro_batches():
        for row in range(len(batch.packed.targets)):
            sample, position = batch.locate(row)
            assert batch.packed.targets[row] == sample.response_ids[position]
            assert batch.rollout_log_probs[row] == sample.rollout_log_probs[position]


def test_samples_that_came_in_a_message_are_packed_as_those_at_home(recwarn):
    """Arrays out of a message cannot be written to (oxwhirl/smacv2#39)."""
    arrived = dict(enumerate(pickle.loads(pickle.dumps(SAMPLES))))
    assert not arrived[0].trajectory.token_ids.array.flags.writeable
    there, here = (
        packed_batch(x, torch.device("cpu")) for x in (arrived, dict(enumerate(SAMPLES)))
    )
    for name in ("tokens", "targets", "temperature", "rows"):
        assert torch.equal(getattr(there.packed, name), getattr(here.packed, name))
    assert torch.equal(there.rollout_log_probs, here.rollout_log_probs)
    there.rollout_log_probs.zero_()
    assert arrived[1].rollout_log_probs == SAMPLES[1].rollout_log_probs and not recwarn.list


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_every_sample_is_in_one_micro_batch_of_one_rank(num_ranks):
    batches = [b for r in range(num_ranks) for b in micro_batches(r, num_ranks, 8)]
    names = sorted(s.name for b in batches if not b.is_filler for s in b.samples)
    assert names == [s.name for s in SAMPLES]


def test_ranks_without_samples_get_a_filler_that_does_not_count():
    every = [b for r in range(7) for b in micro_batches(r, 7, 100)]
    assert sum(b.is_filler for b in every) == 6
    assert all(bool(b.mask.any()) != b.is_filler for b in every)
