"""The governor's rungs as contracts, corrections and learning rates."""

import dataclasses

import pytest

from onpolicy.config import TrainConfig, groups
from onpolicy.contract import NumericsContract, OperatorShapes
from onpolicy.ladder import Ladder, first_rung

SHAPES = OperatorShapes(linear=(), heads=1, kv_heads=1, head_dim=1, norm=(), vocab_size=1)
ALIGNED = NumericsContract(backend="cpu", device="cpu", dtype="float32", shapes=SHAPES)
STOCK = dataclasses.replace(ALIGNED, backend="stock")
BAD = {"parity/num_compared_tokens": 9, "train/k3_kl": 1.0}


def make(governed=True, aligned=False, **fallback):
    config = TrainConfig(
        parity=groups.ParityConfig(true_on_policy_mode=aligned),
        fallback=groups.FallbackConfig(**fallback),
        governor=groups.GovernorFlags(mismatch_governor=governed, governor_rise_after=1),
    )
    return Ladder(config, STOCK, ALIGNED)


def standing(ladder):
    flags = ladder.fallback
    return ladder.contract.backend, flags.use_tis, flags.use_rs, ladder.lr_scale


def test_every_rung_adds_to_the_one_below_up_to_aligned_operators():
    ladder = make()
    seen = [standing(ladder)]
    while ladder.update(BAD) is not None:
        seen.append(standing(ladder))
    assert seen == [
        ("stock", False, False, 1.0),
        ("stock", True, False, 1.0),
        ("stock", True, True, 1.0),
        ("stock", True, True, 0.5),
        ("cpu", True, True, 1.0),
    ]
    assert ladder.metrics() == {"governor/rung": 4.0}
    assert ladder.fallback.get_mismatch_metrics


@pytest.mark.parametrize(
    ("flags", "rung"),
    [
        ({}, "stock"),
        ({"use_tis": True}, "tis"),
        ({"use_tis": True, "use_rs": True}, "mis"),
        ({"aligned": True, "use_tis": True}, "aligned"),
    ],
)
def test_it_starts_where_the_other_flags_put_it(flags, rung):
    assert first_rung(make(**flags).config) == rung


def test_without_a_governor_nothing_moves_and_the_flags_stand():
    ladder = make(governed=False, use_tis=True, tis_upper_bound=3.0)
    assert ladder.update(BAD) is None
    assert ladder.contract == STOCK
    assert ladder.fallback == ladder.config.fallback
    assert ladder.metrics() == ladder.state_dict() == {}
    assert make(governed=False, aligned=True).contract == ALIGNED


def test_a_rollout_that_was_not_trained_on_says_nothing():
    assert make().update({"rollout/num_filtered_groups": 8.0}) is None


def test_a_resumed_ladder_stands_where_it_stood():
    first, second = make(), make()
    first.update(BAD)
    second.load_state_dict(first.state_dict())
    assert standing(second) == standing(first) == ("stock", True, False, 1.0)
