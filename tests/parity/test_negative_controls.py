"""Each operator taken out alone makes the check fail: the check sees what it must see.

The operator is taken out of the trainer, and called there as a stock engine would call it in a
decode step: a row at a time. In one large batch PyTorch's own linear and activation happen to give
most rows the same bits on one thread, which is why averages and lucky batches prove nothing.

RMS norm is controlled in bfloat16: in float32 PyTorch's rounds as the aligned one does.
"""

import pytest
import torch
import torch.nn.functional as F
from engines_fixture import make_engines, make_requests, running
from tiny import make_checkpoint

from onpolicy.models import experts
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.stock import StockOperators
from onpolicy.parity import compare_log_probs

pytestmark = pytest.mark.engine

STOCK = StockOperators()
TEMPERATURE = 0.7


def linear_by_rows(x, weight, bias=None):
    rows = x.reshape(-1, x.shape[-1])
    return torch.cat([STOCK.linear(row, weight, bias) for row in rows.split(1)]).view(
        *x.shape[:-1], -1
    )


def grouped_linear_by_rows(x, weight, offsets):
    chosen = torch.repeat_interleave(torch.arange(len(weight)), offsets.diff())
    rows = [F.linear(row, weight[e]) for row, e in zip(x.split(1), chosen.tolist(), strict=True)]
    return torch.cat(rows)


def elementwise_by_rows(function, x):
    return torch.stack([function(row) for row in x.reshape(-1, x.shape[-1])]).view(x.shape)


def log_of_softmax(logits, temperature):
    """As stock SGLang computes log-probabilities without deterministic inference."""
    return torch.log(torch.softmax(logits.float() / temperature, dim=-1))


IN_FLOAT32 = {
    "linear": linear_by_rows,
    "attention": STOCK.attention,
    "elementwise": elementwise_by_rows,
    "log_softmax": log_of_softmax,
}
OF_EXPERTS = ("grouped_linear", "grouped_partial_linear")


@pytest.fixture(scope="module")
def rollout(engines):
    sampled = make_requests(16, seed=6, temperature=TEMPERATURE)
    return sampled, engines.generate(sampled)


def count_mismatches(engines, sampled, completions):
    scored = engines.trainer.log_probs(
        [r.token_ids + c.token_ids for r, c in zip(sampled, completions, strict=True)],
        [len(request.token_ids) for request in sampled],
        TEMPERATURE,
    )
    sampled_log_probs = torch.tensor([x for c in completions for x in c.log_probs])
    return compare_log_probs(torch.cat(scored), sampled_log_probs)[0].num_mismatched


def test_with_all_operators_nothing_differs(engines, rollout):
    assert count_mismatches(engines, *rollout) == 0


@pytest.mark.parametrize("operator", IN_FLOAT32)
def test_one_stock_operator_is_found_in_float32(engines, rollout, operator, monkeypatch):
    monkeypatch.setattr(engines.trainer.operators, operator, IN_FLOAT32[operator])
    assert count_mismatches(engines, *rollout) > 0


def test_a_stock_rms_norm_is_found_in_bfloat16(checkpoint, tmp_path, monkeypatch):
    with running(make_engines(checkpoint, tmp_path, "bfloat16")) as engines:
        sampled = make_requests(16, seed=6, temperature=TEMPERATURE)
        completions = engines.generate(sampled)
        assert count_mismatches(engines, sampled, completions) == 0
        monkeypatch.setattr(engines.trainer.operators, "rms_norm", STOCK.rms_norm)
        assert count_mismatches(engines, sampled, completions) > 0


@pytest.fixture(scope="module")
def engines_with_experts(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("experts"), "qwen3-moe")
    with running(make_engines(path, tmp_path_factory.mktemp("engines"))) as pair:
        yield pair


@pytest.fixture(scope="module")
def rollout_with_experts(engines_with_experts):
    sampled = make_requests(16, seed=6, temperature=TEMPERATURE)
    return sampled, engines_with_experts.generate(sampled)


def test_with_all_operators_nothing_differs_with_experts(
    engines_with_experts, rollout_with_experts
):
    assert count_mismatches(engines_with_experts, *rollout_with_experts) == 0


@pytest.mark.parametrize("operator", OF_EXPERTS)
def test_stock_experts_are_found(engines_with_experts, rollout_with_experts, operator, monkeypatch):
    operators = engines_with_experts.trainer.operators
    monkeypatch.setattr(operators, operator, grouped_linear_by_rows)
    assert count_mismatches(engines_with_experts, *rollout_with_experts) > 0


def test_a_stock_router_is_found(engines_with_experts, rollout_with_experts, monkeypatch):
    answers = experts._ANSWERS
    monkeypatch.setitem(answers, F.linear, lambda operators, *args: linear_by_rows(*args))
    assert count_mismatches(engines_with_experts, *rollout_with_experts) > 0


def test_every_operator_has_a_control():
    operators = {name for name in vars(CpuOperators) if not name.startswith("_")}
    # softmax is PyTorch's own; the parts of longer sums are in tests/onpolicy/ops/test_row_parallel.
    others = {"column_tile", "softmax", "partial_linear", "blockwise_linear"}
    assert operators - others == {*IN_FLOAT32, *OF_EXPERTS, "rms_norm"}
