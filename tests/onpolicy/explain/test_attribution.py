"""The contracts that an attribution goes through, and its table: rows, effects, how far they add up."""

import dataclasses

import pytest
import torch

from onpolicy.contract import KINDS, OUTSIDE
from onpolicy.explain.attribution import (
    ALIGNED,
    MODEL,
    STOCK,
    all_but,
    attribution_text,
    contracts_of,
    difference,
    effects,
    model_and,
    parts_of,
    sums,
)
from onpolicy.report.explanation import render_attribution
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


def row(name, k3, error=0.001):
    return {
        "name": name, "k3_kl_mean": k3, "k3_kl_standard_error": error, "mean_abs_diff": 0.1,
        "max_abs_diff": 0.2, "num_mismatched_tokens": 3, "num_compared_tokens": 7,
    }  # fmt: skip


ROWS = [
    row("aligned", 0.0, 0.0), row("stock", 0.10), row("model", 0.08),
    row(model_and("norm"), 0.02), row(model_and("rotary"), 0.079),
    row(all_but("norm"), 0.05), row(all_but("rotary"), 0.0, 0.0),
]  # fmt: skip


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


def test_effects_are_of_the_model_on_stock_engines_and_of_each_part_on_top_of_it():
    model, norm, rotary = effects(ROWS)
    assert (model.part, model.before, model.after, model.left) == ("model", 0.10, 0.08, None)
    assert (norm.part, norm.before, norm.after, norm.left) == ("norm", 0.08, 0.02, 0.05)
    assert norm.percent == pytest.approx(-75)
    assert norm.stands_out and not rotary.stands_out


def test_parts_are_added_up_as_a_share_of_what_they_take_away_together():
    assert sums(ROWS) == pytest.approx(((0.06 + 0.001) / 0.08, 0.05 / 0.08))
    assert sums([row(r["name"], 0.0) for r in ROWS]) is None


def test_the_text_says_what_each_part_does_and_the_page_has_a_bar_for_each_row():
    text = attribution_text(ROWS, "kinds")
    assert "norm: aligned, it takes k3 from 0.08 to 0.02 (-75 %); stock, with all else" in text
    assert "rotary: aligned, it takes k3 from 0.08 to 0.079 (-1 %), no more than chance; " in text
    unchanged = [*ROWS, row(model_and("linear"), 0.08), row(all_but("linear"), 0.0)]
    assert "linear: aligned, it changes nothing; stock" in attribution_text(unchanged, "kinds")
    assert "There, of one of the kinds alone:" in text
    assert "the kinds take away 76 % of that k3 one by one, and leave 62 % of it" in text
    page = render_attribution({"rows": ROWS}, text)
    assert page.count("<td class=bar") == len(ROWS) and "width:100.0%" in page
    assert "http" not in page and "<script" not in page
