"""Shapley values of any game: what they promise, held to their definition."""

import math
from itertools import combinations, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.explain.shapley import draw_orders, losses, sets_of, share

PARTS = ("a", "b", "c", "d")
INTEGERS = st.integers(-1000, 1000)
"""Sums of them, and halves, are exact."""


def subsets(parts):
    return [frozenset(own) for size in range(len(parts) + 1) for own in combinations(parts, size)]


ALL, PAIRS = subsets(PARTS), [own for own in subsets(PARTS) if len(own) <= 2]


@st.composite
def games(draw, sets=ALL):
    """A game as a sum: what is added once all of a set are aligned; of two sequences."""
    added = {own: torch.tensor(draw(st.tuples(INTEGERS, INTEGERS))).double() for own in sets}
    return lambda aligned: sum(
        (added[own] for own in sets if own <= aligned), torch.zeros(2).double()
    )


orders_of_parts = st.lists(st.permutations(PARTS).map(tuple), min_size=1, max_size=4)


ORDERS = [*permutations(PARTS)]


def values(game, orders):
    return {part: lost.mean(0) for part, lost in losses(game, orders).items()}


def defined(game, part):
    """Shapley (1953): over all sets without the part, weighed by how often one comes before it."""
    others = [other for other in PARTS if other != part]
    weigh = math.factorial
    return sum(
        weigh(len(own)) * weigh(len(others) - len(own)) * (game(own) - game(own | {part}))
        for own in subsets(others)
    ) / weigh(len(PARTS))


@given(games(), orders_of_parts)
def test_of_every_order_and_every_sequence_losses_add_up_to_the_whole(game, orders):
    lost = torch.stack([*losses(game, orders).values()])
    whole = game(frozenset()) - game(frozenset(PARTS))
    assert torch.equal(lost.sum(0), whole.expand(len(orders), 2))


@given(games())
@settings(max_examples=20)
def test_of_all_orders_they_are_shapleys(game):
    for part, value in values(game, ORDERS).items():
        torch.testing.assert_close(value, defined(game, part), rtol=1e-12, atol=1e-9)


@given(games())
@settings(max_examples=20)
def test_parts_that_do_the_same_have_the_same(game):
    """A game that does not tell a from b."""

    def swapped(aligned):
        return frozenset({"a": "b", "b": "a"}.get(part, part) for part in aligned)

    found = values(lambda aligned: game(aligned) + game(swapped(aligned)), ORDERS)
    torch.testing.assert_close(found["a"], found["b"], rtol=1e-12, atol=1e-9)


@given(games(), orders_of_parts)
def test_what_changes_nothing_has_nothing_in_any_order(game, orders):
    lost = losses(lambda aligned: game(aligned - {"b"}), orders)["b"]
    assert torch.equal(lost, torch.zeros_like(lost))


@given(games(sets=[frozenset(part) for part in PARTS]), st.permutations(PARTS))
def test_one_order_is_exact_where_parts_act_alone(game, order):
    for part, value in values(game, [tuple(order)]).items():
        assert torch.equal(value, game(frozenset()) - game(frozenset({part})))


@given(games(sets=PAIRS), st.permutations(PARTS))
def test_one_order_and_its_reverse_are_exact_where_parts_act_by_twos(game, order):
    for part, value in values(game, [tuple(order)]).items():
        torch.testing.assert_close(value, defined(game, part), rtol=1e-12, atol=1e-9)


def test_one_order_is_not_exact_where_three_act_together():
    """The control of the tests above."""

    def game(aligned):
        return torch.tensor([-1.0 if {"a", "b", "c"} <= aligned else 0.0]).double()

    found = values(game, [PARTS])
    assert [float(found[part]) for part in PARTS] == [0.5, 0, 0.5, 0]
    assert float(defined(game, "b")) == pytest.approx(1 / 3)


@given(orders_of_parts)
def test_a_game_is_asked_for_the_sets_that_were_told_and_for_no_others(orders):
    asked = set()

    def game(aligned):
        asked.add(aligned)
        return torch.zeros(1)

    losses(game, orders)
    told = sets_of(orders)
    assert asked == set(told) and len(told) == len(asked)


def test_orders_are_of_all_parts_and_follow_from_the_seed():
    drawn = draw_orders(PARTS, count=50, seed=1)
    assert all(sorted(order) == list(PARTS) for order in drawn)
    assert len(set(drawn)) > 12  # of 24
    assert drawn == draw_orders(PARTS, count=50, seed=1) != draw_orders(PARTS, count=50, seed=2)


def test_a_share_is_a_mean_over_tokens_with_an_error_of_orders_and_one_of_prompts():
    tokens = torch.tensor([2.0, 2.0]).double()
    agreed = share("a", torch.tensor([[4.0, 4.0], [4.0, 4.0]]).double(), tokens)
    assert (agreed.value, agreed.error_of_orders, agreed.error_of_prompts) == (2, 0, 0)
    of_orders = share("a", torch.tensor([[3.0, 3.0], [5.0, 5.0]]).double(), tokens)
    assert (of_orders.value, of_orders.error_of_prompts) == (2, 0)
    assert of_orders.error_of_orders == pytest.approx(0.5)  # 1.5 and 2.5, of two
    of_prompts = share("a", torch.tensor([[3.0, 5.0], [3.0, 5.0]]).double(), tokens)
    assert (of_prompts.value, of_prompts.error_of_orders) == (2, 0)
    assert of_prompts.error_of_prompts == pytest.approx(0.5)
    assert agreed.stands_out and of_orders.stands_out and of_prompts.stands_out


def test_what_stands_out_is_beyond_both_errors_together():
    lost = torch.tensor([[0.5, 2.5], [2.5, 4.5]]).double()
    found = share("a", lost, torch.tensor([1.0, 1.0]).double())
    assert (found.value, found.error_of_orders, found.error_of_prompts) == (2.5, 1, 1)
    assert not found.stands_out  # though it is beyond either alone
    more = share("a", lost + 0.5, torch.tensor([1.0, 1.0]).double())
    assert more.value == 3 and more.stands_out
