"""Each operator off by one bit alone makes the check fail: the check sees what it must see.

The violation is built, so it is there on every CPU: the trainer's operator gives the next larger
number everywhere. What stock operators do on one machine or another is in docs/bitwise_parity.md.
"""

import pytest
import torch
import torch.nn.functional as F

from onpolicy.models import expert_layers
from onpolicy.ops.cpu import CpuOperators
from onpolicy.parity import compare_log_probs
from tests.support.engines_fixture import make_engines, make_requests, running
from tests.support.tiny import make_checkpoint
from tests.support.violations import always, break_operator, next_up

pytestmark = pytest.mark.engine

TEMPERATURE = 0.7

OF_DENSE_MODELS = (
    "linear", "attention", "rms_norm", "rotary", "gated", "elementwise", "log_softmax",
)  # fmt: skip
OF_EXPERTS = ("grouped_linear", "grouped_partial_linear", "softmax")


@pytest.fixture(scope="module")
def rollout(engines):
    sampled = make_requests(16, seed=6, temperature=TEMPERATURE)
    return sampled, engines.generate(sampled)


def count_mismatches(engines, sampled, completions):
    scored = engines.trainer.log_probs(
        [[*r.prompt_ids, *c.response_ids] for r, c in zip(sampled, completions, strict=True)],
        [len(request.prompt_ids) for request in sampled],
        TEMPERATURE,
    )
    sampled_log_probs = torch.tensor([x for c in completions for x in c.rollout_log_probs])
    return compare_log_probs(torch.cat(scored), sampled_log_probs)[0].num_mismatched


def test_with_all_operators_nothing_differs(engines, rollout):
    assert count_mismatches(engines, *rollout) == 0


@pytest.fixture
def broken(monkeypatch):
    """Lets one operator of a trainer round up until the test has ended."""

    def break_it(engines, operator):
        operators = engines.trainer.operators
        monkeypatch.setattr(operators, operator, getattr(operators, operator))
        break_operator(operators, operator, always)

    return break_it


@pytest.mark.parametrize("operator", OF_DENSE_MODELS)
def test_one_operator_off_by_one_bit_is_found(engines, rollout, broken, operator):
    broken(engines, operator)
    assert count_mismatches(engines, *rollout) > 0


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
def test_experts_off_by_one_bit_are_found(
    engines_with_experts, rollout_with_experts, broken, operator
):
    broken(engines_with_experts, operator)
    assert count_mismatches(engines_with_experts, *rollout_with_experts) > 0


def test_a_router_off_by_one_bit_is_found(engines_with_experts, rollout_with_experts, monkeypatch):
    linear = expert_layers._ANSWERS[F.linear]
    monkeypatch.setitem(expert_layers._ANSWERS, F.linear, lambda *args: next_up(linear(*args)))
    assert count_mismatches(engines_with_experts, *rollout_with_experts) > 0


def test_every_operator_has_a_control():
    operators = {name for name in dir(CpuOperators) if not name.startswith("_")}
    # The parts of longer sums are in tests/onpolicy/ops/test_row_parallel.py.
    others = {"partial_linear", "blockwise_linear", "row_parallel_linear"}
    # In tests/onpolicy/models/test_architectures.py, since no architecture of these has them.
    others |= {"layer_norm", "causal_conv", "gated_delta"}
    # In tests/parity/test_adapters.py, since a model without adapters does not have it.
    others |= {"add_scaled"}
    # What one engine calls alone, and what has no bits of its own.
    others |= {"paged_attention", "sample", "gather_log_probs", "grad_logits", "topk"}
    others |= {"linear_gradients", "logits_per_chunk", "rows_per_chunk", "run_pieces", "uniform"}
    others |= {"column_tile", "key_chunk"}
    # Made of those: tests/onpolicy/models/test_fused_layers.py,
    # tests/onpolicy/ops/triton/test_mixing.py.
    others |= {"add_rms_norm", "norm_rotary", "mix_few"}
    # Of linears of bytes: tests/onpolicy/models/test_rounded_inputs.py.
    others |= {"of_rounded", "hold"}
    assert operators - others == {*OF_DENSE_MODELS, *OF_EXPERTS}
