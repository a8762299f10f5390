import pytest
import torch

from onpolicy.train.batch import make_micro_batches
from onpolicy.types import TrainSample

SAMPLES = [
    TrainSample(
        token_ids=list(range(10 * i, 10 * i + prompt + response)),
        prompt_len=prompt,
        rollout_log_probs=[-float(i)] * response,
        advantage=float(i),
        label=f"sample {i}",
    )
    for i, (prompt, response) in enumerate([(2, 3), (1, 1), (4, 2), (3, 4)])
]


def micro_batches(rank=0, num_ranks=1, max_tokens=8, aggregation="token-mean"):
    return make_micro_batches(
        SAMPLES,
        rank=rank,
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        temperature=0.7,
        aggregation=aggregation,
        device=torch.device("cpu"),
    )


def test_targets_are_the_response_tokens_and_rows_the_ones_before_them():
    for batch in micro_batches():
        expected = [t for s in batch.samples for t in s.token_ids[s.prompt_len :]]
        assert batch.packed.targets.tolist() == expected
        assert (batch.packed.tokens[batch.packed.rows] == batch.packed.targets - 1).all()
        assert torch.equal(batch.packed.temperature, torch.full((len(expected),), 0.7))


def test_positions_restart_with_every_sequence():
    (batch,) = micro_batches(max_tokens=100)
    assert batch.packed.positions.tolist() == [
        p for s in batch.samples for p in range(len(s.token_ids))
    ]


def test_values_stand_beside_their_tokens():
    for batch in micro_batches():
        for row in range(len(batch.packed.targets)):
            sample, position = batch.locate(row)
            assert batch.packed.targets[row] == sample.token_ids[sample.prompt_len + position]
            assert batch.advantages[row] == sample.advantage
            assert batch.rollout_log_probs[row] == sample.rollout_log_probs[position]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_weights_sum_to_one_over_all_ranks_however_it_is_split(aggregation, num_ranks):
    batches = [b for r in range(num_ranks) for b in micro_batches(r, num_ranks, 8, aggregation)]
    assert sum(b.weights.sum() for b in batches).item() == pytest.approx(1)


def test_ranks_without_samples_get_a_filler_of_weight_zero():
    fillers = [b for r in range(7) for b in micro_batches(r, 7, 100) if b.is_filler]
    assert len(fillers) == 6
    assert all(b.weights.sum() == 0 for b in fillers)
