"""The contracts that an attribution goes through."""

import dataclasses

import pytest

from onpolicy.contract import KINDS, OUTSIDE
from onpolicy.explain.attribution import contracts_of, parts_of
from onpolicy.explain.effects import ALIGNED, MODEL, STOCK, all_but, effects, model_and
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
def test_every_part_has_an_effect(by):
    parts = parts_of(CONTRACT, by, 3)
    row = {"k3_kl_mean": 0.0, "k3_kl_standard_error": 0.0}
    rows = [{"name": name, **row} for name in contracts(CONTRACT, by)]
    assert [effect.part for effect in effects(rows)] == [MODEL, *(name for name, *_ in parts)]
