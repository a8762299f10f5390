"""Each operator taken out alone makes the check fail: the check sees what it must see.

The operator is taken out of the trainer, and called there as a stock engine would call it in a
decode step: a row at a time. In one large batch PyTorch's own linear and activation happen to give
most rows the same bits on one thread, which is why averages and lucky batches prove nothing.

RMS norm is controlled in bfloat16: in float32 PyTorch's rounds as the aligned one does.
"""

import pytest
import torch
from engines_fixture import make_engines, make_requests, running

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


def test_every_operator_that_a_dense_model_calls_has_a_control():
    operators = {name for name in vars(CpuOperators) if not name.startswith("_")}
    assert operators - {"column_tile", "softmax"} == {*IN_FLOAT32, "rms_norm"}
