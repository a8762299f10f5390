"""The table of what operators contribute: sums, groups, intervals, and its words."""

import json

import pytest
import torch

from onpolicy.explain.contributions import Contribution, Contributions
from onpolicy.explain.shares import intervals, shares_text, table
from onpolicy.report.explanation import render_shares
from tests.support.train_runs import ROOT

NORM = (("layers.0.input_layernorm", "rms_norm", 0), "made")
BEFORE = (("layers.1.input_layernorm", "rms_norm", 0), "given")
HEAD = (("lm_head", "linear", 0), "made")


def contributions(tokens, **kl):
    points = {"norm": NORM, "before": BEFORE, "head": HEAD}
    return Contributions(
        tokens=tokens, kl=sum(kl.values()) + 0.01, shift=0.0,
        log_probs=(torch.zeros(tokens), torch.zeros(tokens)),
        points={
            points[name]: Contribution(kl=value, own_kl=value / 2, shift=0.0, own_shift=0.0)
            for name, value in kl.items()
        },
    )  # fmt: skip


FOUND = [contributions(3, norm=0.6, before=0.2, head=-0.1), contributions(1, norm=0.1, head=0.0)]
COUNTS = {
    "num_mismatched_tokens": 4, "num_compared_tokens": 4, "k3_kl_mean": 0.2, "only_in_one": [],
    "ranks_differ": [],
}  # fmt: skip


def test_contributions_are_added_up_per_token_of_all_sequences():
    result = table(FOUND)
    by = {name: {row["name"]: row["kl"][0] for row in result[name]} for name in ("kinds", "layers")}
    assert by["kinds"] == pytest.approx(
        {"norm": 0.7 / 4, "between operators": 0.05, "linear": -0.025}
    )
    assert by["layers"] == pytest.approx({"layer 0": 0.7 / 4, "layer 1": 0.05, "outside": -0.025})
    assert result["kl"][0] == pytest.approx(0.82 / 4)
    assert result["kl_remainder"] == pytest.approx(0.02 / 4)
    names = [row["name"] for row in result["operators"]]
    assert names[1] == "before rms_norm of layers.1.input_layernorm"


def test_intervals_are_of_sequences_and_not_of_tokens():
    """Of one sequence that is repeated nothing varies; of two that differ the interval has both."""
    tokens = torch.tensor([2.0, 2.0], dtype=torch.float64)
    values = torch.tensor([[2.0, 1.0], [2.0, 3.0]], dtype=torch.float64)
    assert intervals(values, tokens) == [[1, 1, 1], [1, 0.5, 1.5]]
    many = torch.randn(400, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    number, low, high = intervals(many, torch.ones(400, dtype=torch.float64))[0]
    assert high - low == pytest.approx(2 * 1.96 / 20, rel=0.1) and low < number < high


def test_the_text_says_which_kind_to_align_and_the_page_has_a_bar_for_each_row():
    result = {**COUNTS, **table(FOUND)}
    text = shares_text(result)
    assert "add up to the KL but for 2.4 % of it" in text
    assert "If one kind alone could be aligned: norm, which has 87.5 % of what" in text
    page = render_shares(result, text)
    assert page.count("<td class=bar") == 3 + 3 + 3 and "http" not in page
    aligned = {**COUNTS, **table([contributions(3, norm=0.0)])}
    aligned["kl"] = [0.0, 0.0, 0.0]
    assert "Every operator contributes exactly 0." in shares_text(aligned)
    others = shares_text({**result, "num_other_choices": 5, "num_left_out": 1})
    assert others.startswith(
        "4 of 4 tokens differ, in 3 sequences.\nRouters chose other experts for 5"
    )
    assert "of those before: 4 sampled tokens, in 2 sequences." in others
    differ = shares_text({**result, "ranks_differ": ["rms_norm of norm"]})
    assert "Ranks of the rollout have other numbers in the same rows" in differ
    assert "are taken: rms_norm of norm." in differ and "Ranks" not in shares_text(result)
    missing = shares_text({**result, "only_in_one": ["layer_norm of norm"]})
    assert (
        "Not recorded in the rollout, so part of what comes after: layer_norm of norm." in missing
    )


def record(name):
    path = ROOT / "benchmarks" / "results" / f"operators{name}_quickstart.json"
    return json.loads(path.read_text())


def test_the_page_shows_the_tables_of_the_records():
    page = (ROOT / "docs" / "explain.md").read_text()
    for name, first, last in (("", "KL of the rollout", "layers "), ("_int8", "linear ", "norm ")):
        lines = shares_text(record(name)).splitlines()
        start, end = (
            next(i for i, line in enumerate(lines) if line.startswith(word))
            for word in (first, last)
        )
        assert "\n".join(f"    {line}" for line in lines[start:end]) in page


def test_the_page_says_what_swapping_norms_did():
    page = (ROOT / "docs" / "explain.md").read_text()
    before, after = record(""), record("_norms")
    less = 1 - after["kl"][0] / before["kl"][0]
    assert f"the KL is {after['kl'][0]:.2g}, which is {100 * less:.0f} % less" in page
    own = {row["name"]: row["own_kl"][0] for row in after["kinds"]}
    assert own["norm"] == 0 < own["attention"] == after["own_kl"][0]
    norms = next(row for row in before["kinds"] if row["name"] == "norm")
    assert f"they have {100 * norms['own_kl'][0] / before['own_kl'][0]:.0f} % of what" in page
    assert norms["own_kl"][1] > 0  # it is no chance of the sample
