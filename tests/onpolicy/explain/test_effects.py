"""What the rows of an attribution say: effects, shares, text and page."""

import dataclasses

import pytest

from onpolicy.explain.attribution import contracts_of, parts_of
from onpolicy.explain.effects import (
    MODEL,
    all_but,
    attribution_text,
    effects,
    model_and,
    shares,
)
from onpolicy.explain.shapley import Share
from onpolicy.report.explanation import render_attribution
from tests.support.tiny_contract import CONTRACT


def row(name, k3, error=0.001):
    return {
        "name": name, "k3_kl_mean": k3, "k3_kl_standard_error": error, "mean_abs_diff": 0.1,
        "max_abs_diff": 0.2, "num_mismatched_tokens": 3, "num_compared_tokens": 7,
        "sequence_lengths": [3, 4], "sequence_k3_kl_sums": [4 * k3, 3 * k3],
    }  # fmt: skip


ROWS = [
    row("aligned", 0.0, 0.0), row("stock", 0.10), row("model", 0.08),
    row(model_and("norm"), 0.02), row(model_and("rotary"), 0.079),
    row(all_but("norm"), 0.05), row(all_but("rotary"), 0.0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("by", ["kinds", "layers"])
def test_every_part_has_an_effect(by):
    parts = parts_of(CONTRACT, by, 3)
    rows = [row(name, 0.0) for name, _ in contracts_of(CONTRACT, CONTRACT, parts)]
    assert [effect.part for effect in effects(rows)] == [MODEL, *(name for name, *_ in parts)]


def test_effects_are_of_the_model_on_stock_engines_and_of_each_part_on_top_of_it():
    model, norm, rotary = effects(ROWS)
    assert (model.part, model.before, model.after, model.left) == ("model", 0.10, 0.08, None)
    assert (norm.part, norm.before, norm.after, norm.left) == ("norm", 0.08, 0.02, 0.05)
    assert norm.percent == pytest.approx(-75)
    assert norm.stands_out and not rotary.stands_out


ORDERS = [("norm", "rotary")] * 2


def test_shares_of_the_model_and_of_parts_add_up_to_the_k3_of_stock_engines():
    """norm takes 0.06 away before rotary and, since rotary alone leaves 0.05, 0.05 after it."""
    rows = [r for r in ROWS if r["name"] != model_and("rotary")]
    rows.append(row(model_and("rotary"), 0.05))
    model, norm, rotary = shares(rows, ["norm", "rotary"], ORDERS)
    assert (model.part, norm.part, rotary.part) == ("model", "norm", "rotary")
    assert model.value == pytest.approx(0.10 - 0.08)
    assert norm.value == pytest.approx((0.06 + 0.05) / 2)
    assert rotary.value == pytest.approx((0.03 + 0.02) / 2)
    assert model.value + norm.value + rotary.value == pytest.approx(0.10, rel=1e-12)
    assert model.error_of_orders == 0 == norm.error_of_orders < norm.error_of_prompts


def test_the_text_says_what_each_part_does_and_the_page_has_a_bar_for_each_row():
    text = attribution_text({"rows": ROWS, "by": "kinds"})
    assert "norm: aligned, it takes k3 from 0.08 to 0.02 (-75 %); stock, with all else" in text
    assert "rotary: aligned, it takes k3 from 0.08 to 0.079 (-1 %), no more than chance; " in text
    unchanged = [*ROWS, row(model_and("linear"), 0.08), row(all_but("linear"), 0.0)]
    assert "linear: aligned, it changes nothing; stock" in attribution_text(
        {"rows": unchanged, "by": "kinds"}
    )
    assert "There, of one of the kinds alone:" in text
    assert "These do not add up" in text
    page = render_attribution({"rows": ROWS}, text)
    assert page.count("<td class=bar") == len(ROWS) and "width:100.0%" in page
    assert "http" not in page and "<script" not in page


def test_shares_are_in_the_text_and_on_the_page_and_what_is_chance_is_said():
    found = [
        Share(part=part, value=value, error_of_orders=0.01, error_of_prompts=0.01)
        for part, value in (("model", -0.1), ("norm", 0.18), ("rotary", 0.02), ("linear", 0.0))
    ]
    orders = {"drawn": ORDERS, "rows": [row(all_but("a", "b"), 0.01)]}
    orders["shares"] = [dataclasses.asdict(one) for one in found]
    result = {"rows": ROWS, "by": "kinds", "orders": orders}
    text = attribution_text(result)
    assert "The k3 of stock engines, 0.1, " in text and "in 2 random orders" in text
    of_parts = {line.split()[0]: line for line in text.splitlines()[-4:]}
    assert "-100 %" in of_parts["model"] and "180 %" in of_parts["norm"]
    assert [part for part in of_parts if "no more than chance" in of_parts[part]] == ["rotary"]
    page = render_attribution(result, text)
    assert page.count("<td class=bar") == len(found) + len(ROWS) + 1
    assert 'class="given s4" style="width:55.6%"' in page  # of model, which adds to it
