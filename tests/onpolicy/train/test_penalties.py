"""What tokens pay: as much as peers' functions say, and on any number of ranks the same."""

import json
from pathlib import Path

import pytest
import torch

from onpolicy.config import TrainConfig, groups
from onpolicy.train.penalties import Penalties
from tests.support.onpolicy_batches import make_micro_batches
from tests.support.ranks import on_ranks
from tests.support.samples import make_train_sample

PEERS = json.loads((Path(__file__).parents[2] / "data/peer_losses.json").read_text())


def penalties(longest=20, **algorithm):
    return Penalties(
        TrainConfig(
            algorithm=groups.AlgorithmConfig(**algorithm),
            rollout=groups.RolloutConfig(rollout_max_response_len=longest),
        )
    )


def paid(penalties, samples, num_ranks=1):
    """What every sample pays, and metrics, after one rollout of which the reference says half."""

    def on_rank(rank):
        batches = make_micro_batches(samples, max_tokens=9, rank=rank, num_ranks=num_ranks)
        old = [batch.rollout_log_probs for batch in batches]
        found, metrics = penalties.of(batches, old, [x / 2 for x in old])
        return found, metrics

    results = on_ranks(num_ranks, on_rank)
    assert all(metrics == results[0][1] for _, metrics in results)
    return dict(sorted(pair for found, _ in results for pair in found.items())), results[0][1]


def samples(lengths):
    return [make_train_sample(range(1 + n), 1, [-0.5] * n, 1.0, i) for i, n in enumerate(lengths)]


def test_answers_that_are_too_long_pay_as_in_areal():
    case = PEERS["overlong"]
    these = penalties(
        overlong_buffer_len=case["buffer"], overlong_penalty_factor=case["factor"],
        longest=case["longest"],
    )  # fmt: skip
    found, _ = paid(these, samples(case["lengths"]))
    assert [-each[-1] for each in found.values()] == pytest.approx(case["rewards"], abs=1e-6)
    assert all(not any(each[:-1]) for each in found.values())


@pytest.mark.parametrize(
    ("kind", "kl"), [("k1", -0.25), ("k2", 0.03125), ("k3", 0.0340254), ("low_var_kl", 0.0340254)]
)
def test_a_token_pays_its_kl_by_any_estimator_on_any_number_of_ranks(kind, kl):
    these = penalties(kl_coef=0.2, kl_penalty=kind)
    found, metrics = paid(these, samples([3, 1, 5, 2]))
    assert [x for each in found.values() for x in each] == pytest.approx([0.2 * kl] * 11)
    assert metrics["train/kl_in_reward"] == pytest.approx(kl) and metrics["train/kl_coef"] == 0.2
    for num_ranks in (2, 3):
        assert paid(these, samples([3, 1, 5, 2]), num_ranks) == (found, metrics)


def test_the_adaptive_controller_moves_as_verls_and_goes_on_from_a_checkpoint():
    case = PEERS["kl_controller"]
    settings = {
        "kl_coef": case["kl_coef"], "kl_ctrl": "adaptive", "kl_target": case["target"],
        "kl_horizon": case["horizon"],
    }  # fmt: skip
    these, values = penalties(**settings), []
    for kl in case["kl"]:
        many = [make_train_sample([1, 2], 1, [2 * kl], 0.0, i) for i in range(case["samples"])]
        assert paid(these, many)[1]["train/kl_in_reward"] == pytest.approx(kl)
        these.step()
        values.append(these.kl_coef)
        state = these.state_dict()
        these = penalties(**settings)
        these.load_state_dict(state)
    assert values == pytest.approx(case["values"], rel=1e-6)
    fixed = penalties(kl_coef=0.2)
    paid(fixed, many)
    fixed.step()
    assert fixed.kl_coef == 0.2 and fixed.state_dict() == {}


def test_without_a_penalty_nobody_pays_and_nothing_is_measured():
    batches = make_micro_batches(samples([3]), max_tokens=9)
    assert penalties().of(batches, [None], [None]) == (None, {})


def test_a_masked_token_pays_nothing_whatever_stands_there():
    (batch,) = make_micro_batches(samples([2]), max_tokens=9)
    batch = type(batch).after(batch)
    object.__setattr__(batch, "mask", torch.tensor([True, False]))
    old = torch.tensor([-0.5, float("nan")])
    from onpolicy.train import distributed

    distributed.init_process_group()
    found, _ = penalties(kl_coef=1.0).of([batch], [old], [torch.tensor([-0.25, -1.0])])
    assert found == {0: [-0.25, 0.0]}
