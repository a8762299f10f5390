"""The contracts that an attribution goes through, and its rows."""

import dataclasses

import pytest
import torch

from onpolicy.contract import KINDS, OUTSIDE
from onpolicy.explain.attribution import (
    contracts_between,
    contracts_of,
    difference,
    parts_of,
)
from onpolicy.explain.effects import ALIGNED, MODEL, STOCK, all_but, model_and
from onpolicy.explain.shapley import draw_orders
from tests.support.tiny_contract import CONTRACT

STOCK_CONTRACT = dataclasses.replace(CONTRACT, backend="stock")
DENSE = dataclasses.replace(CONTRACT, shapes=dataclasses.replace(CONTRACT.shapes, experts=()))


def contracts(whole, by, layers=3):
    return dict(contracts_of(whole, STOCK_CONTRACT, parts_of(whole, by, layers)))


@pytest.mark.parametrize("by", ["kinds", "layers"])
def test_the_whole_contract_comes_first_then_none_of_it_then_the_model_alone(by):
    first = list(contracts(CONTRACT, by).items())[:3]
    model = dataclasses.replace(CONTRACT, kinds=("model",))
    assert first == [(ALIGNED, CONTRACT), (STOCK, STOCK_CONTRACT), (MODEL, model)]


@pytest.mark.parametrize(("whole", "absent"), [(CONTRACT, set()), (DENSE, {"experts"})])
def test_every_kind_that_the_model_has_is_aligned_alone_and_left_out_alone(whole, absent):
    rows, kinds = contracts(whole, "kinds"), set(KINDS) - {"model"} - absent
    assert len(rows) == 3 + 2 * len(kinds)
    for kind in kinds:
        assert rows[model_and(kind)].kinds == ("model", kind)
        assert {*rows[all_but(kind)].kinds, kind} == {"model", *kinds}
        assert kind not in rows[all_but(kind)].kinds


def test_every_layer_and_what_is_outside_is_aligned_alone_and_left_out_alone():
    rows, layers = contracts(CONTRACT, "layers"), ("0", "1", "2", OUTSIDE)
    assert len(rows) == 3 + 2 * len(layers)
    for layer in layers:
        name = layer if layer == OUTSIDE else f"layer {layer}"
        assert rows[model_and(name)] == dataclasses.replace(CONTRACT, layers=(layer,))
        assert rows[all_but(name)].layers == tuple(other for other in layers if other != layer)


@pytest.mark.parametrize("by", ["kinds", "layers"])
def test_orders_take_servers_for_what_no_other_row_has_and_each_once(by):
    parts = parts_of(CONTRACT, by, 5)
    orders = draw_orders([name for name, *_ in parts], count=20, seed=3)
    between, others = list(contracts_between(parts, orders)), contracts(CONTRACT, by, 5)
    names, own = zip(*between, strict=True)
    assert len({*names, *others}) == len(names) + len(others)
    assert len(set(own) | set(others.values())) == len(own) + len(others)
    one = list(contracts_between(parts, orders[:1]))
    assert len(one) == 2 * (len(parts) - 3)  # as the flag's help says
    first, second, *_ = ({n: alone for n, alone, _ in parts}[name] for name in orders[0])
    aligned = {*first.kinds, *second.kinds}, {*first.layers, *second.layers}
    assert ({*one[0][1].kinds}, {*one[0][1].layers}) == aligned
    assert all(
        list(contract.kinds) == [k for k in KINDS if k in contract.kinds] for contract in own
    )


def test_few_parts_have_all_rows_without_orders():
    parts = parts_of(CONTRACT, "layers", 2)
    assert not list(contracts_between(parts, draw_orders([name for name, *_ in parts], 6, 0)))


def test_a_row_compares_bits_and_averages_k3():
    train = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])]
    rollout = [torch.tensor([-1.0, -2.5]), torch.tensor([-0.5])]
    found = difference(train, rollout)
    assert (found["num_compared_tokens"], found["num_mismatched_tokens"]) == (3, 1)
    apart = torch.tensor([0.0, 0.5, 0.0]).double()
    k3 = apart.exp() - apart - 1
    assert found["k3_kl_mean"] == pytest.approx(float(k3.mean()))
    first, second = float(k3[:2].sum()), float(k3[2])
    apart = first - 2 * (first + second) / 3  # of the first; of the second it is the opposite
    assert found["k3_kl_standard_error"] == pytest.approx((2 * 2 * apart**2) ** 0.5 / 3)
    assert found["max_abs_diff"] == 0.5 and found["mean_abs_diff"] == pytest.approx(0.5 / 3)


def test_the_error_of_k3_is_of_sequences_and_not_of_tokens():
    """Of equal tokens in each sequence, many say no more than one."""
    once = [torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([-1.2])]
    many = [numbers.expand(50) for numbers in once]
    errors = [
        difference(train, [torch.full_like(x, -1.0) for x in train])["k3_kl_standard_error"]
        for train in (once, many)
    ]
    assert errors[0] == pytest.approx(errors[1]) and errors[0] > 0


def test_not_a_number_is_a_mismatch():
    nan = [torch.tensor([float("nan")])]
    assert difference(nan, nan)["num_mismatched_tokens"] == 1
