"""Of mixtures contributions add up where routers chose the same experts; other choices end sequences."""

import pytest
import torch

from onpolicy.errors import EngineError
from onpolicy.explain import contributions
from onpolicy.explain.choices import (
    chosen_experts,
    count_before,
    other_choices,
    require_choices,
)
from onpolicy.explain.shares import kind_of
from onpolicy.explain.taps.recorder import CHOSEN_EXPERTS
from onpolicy.explain.taps.rows import prefix_keys
from onpolicy.models.routing_replay import OWN_CHOICE
from onpolicy.ops.stock import StockOperators
from tests.onpolicy.explain.test_contributions import SEQUENCES, Engines, scaled, total
from tests.support.recorded_policies import replace_in
from tests.support.tiny import make_checkpoint

ROUTER, EXPERTS = "layers.1.mlp", "layers.1.mlp.experts"
CHOSEN = ((EXPERTS, CHOSEN_EXPERTS, 0), "made")
ROUTED, MADE = ((EXPERTS, "routing", 0), "made"), ((EXPERTS, "experts", 0), "made")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "moe", "qwen3-moe")


@pytest.fixture
def engines(mixture):
    return Engines(mixture)


def second_best(right):
    """A router that leaves out the expert that it likes best."""

    def topk(x, k):
        values, indices = right(x, k + 1)
        return values[:, 1:], indices[:, 1:]

    return topk


def turned_round(right):
    """A router that names the same experts in another order."""
    return lambda x, k: tuple(part.flip(-1) for part in right(x, k))


def test_between_aligned_mixtures_everything_contributes_exactly_0(engines):
    found = engines.contributions()
    assert found.kl == found.shift == 0 < found.tokens
    assert "experts" in {kind_of(point) for point in found.points}
    assert {operator for ((module, operator, _), _) in found.points if module == EXPERTS} == {
        "experts",
        "routing",
    }
    for point in found.points.values():
        assert point.kl == point.own_kl == point.shift == point.own_shift == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_stock_and_aligned_mixtures_contributions_add_up(mixture, dtype):
    """But for what routers' code rounds to float32 in any model."""
    engines = Engines(mixture, StockOperators, dtype)
    rows = engines.rows()
    others = other_choices(*rows[:2])
    for sequence in SEQUENCES:
        sequence = sequence[: count_before(others, torch.tensor(prefix_keys(sequence)))]
        found = engines.contributions(sequence, rows)
        assert found.kl > 0 and total(found, "kl") == pytest.approx(found.kl, rel=0.02)
        assert total(found, "shift") == pytest.approx(found.shift, rel=1e-3, abs=1e-5)


def test_broken_experts_have_nearly_all_of_it(engines, monkeypatch):
    replace_in(monkeypatch, engines.rollout, EXPERTS, "grouped_linear", scaled)
    found = engines.contributions()
    own = found.points.pop(MADE)
    assert own.own_kl == pytest.approx(found.kl, rel=0.02) and found.kl > 0
    assert all(c.own_kl == c.own_shift == 0 for c in found.points.values())


@pytest.mark.parametrize("takes_recorded", [True, False])
def test_the_float64_model_takes_the_choice_of_both_engines(engines, monkeypatch, takes_recorded):
    """The control: by its own choice it is another model, and parts miss the whole."""
    for policy in (engines.rollout, engines.trainer):
        replace_in(monkeypatch, policy, ROUTER, "topk", second_best)
    replace_in(monkeypatch, engines.rollout, EXPERTS, "grouped_linear", scaled)
    if not takes_recorded:
        monkeypatch.setattr(contributions, "chosen_experts", lambda *_: None)
    found = engines.contributions()
    adds_up = total(found, "kl") == pytest.approx(found.kl, rel=0.02)
    assert adds_up == takes_recorded and found.kl > 0


def test_a_router_that_chose_others_ends_each_sequence_there(engines, monkeypatch):
    replace_in(monkeypatch, engines.rollout, ROUTER, "topk", second_best)
    theirs, ours, _ = engines.rows()
    others = other_choices(theirs, ours)
    assert torch.equal(others, ours[CHOSEN].keys)
    keys = torch.tensor(prefix_keys(SEQUENCES[0]))
    assert count_before(others, keys) == 1 and count_before(keys[5:9], keys) == 6
    assert count_before(others[:0], keys) == len(keys)


def test_the_order_in_which_experts_were_chosen_is_no_choice(engines, monkeypatch):
    replace_in(monkeypatch, engines.rollout, ROUTER, "topk", turned_round)
    rows = engines.rows()
    theirs, ours, _ = rows
    assert len(other_choices(theirs, ours)) == 0
    assert torch.equal(theirs[ROUTED].rows[0], ours[ROUTED].rows[0])
    assert engines.contributions(rows=rows).kl < 1e-8


def test_choices_are_found_by_layer_and_token(engines):
    _, ours, _ = engines.rows()
    kept, keys = ours[CHOSEN], torch.tensor(prefix_keys(SEQUENCES[1]))
    table = chosen_experts(ours, torch.cat([keys, keys[:1] + 1]), num_layers=3)
    where, found = kept.find(keys[:-1])
    assert found.all() and torch.equal(
        table[: len(keys) - 1].view(-1, 3, 2)[:, 1], kept.rows[0][where]
    )
    assert (table.view(-1, 3, 2)[:, 2] == OWN_CHOICE).all() and (table[-1] == OWN_CHOICE).all()
    assert chosen_experts({}, keys, num_layers=3) is None


def test_a_rollout_without_choices_is_refused(engines):
    theirs, ours, _ = engines.rows()
    require_choices(theirs, ours)
    del theirs[CHOSEN]
    with pytest.raises(EngineError, match=f"no choice of experts of {EXPERTS}, so"):
        require_choices(theirs, ours)
