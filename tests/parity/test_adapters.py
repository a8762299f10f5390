"""A real engine and a real trainer with the same adapters, and with others."""

import pytest
import torch

from onpolicy.config import groups
from onpolicy.models.adapters import adapters
from onpolicy.models.weight_files import CheckpointReader
from onpolicy.weights.rounding import round_weight
from tests.parity.test_negative_controls import TEMPERATURE, count_mismatches
from tests.support.engines_fixture import make_engines, make_requests, running

pytestmark = pytest.mark.engine


@pytest.fixture(
    scope="module", params=[(1, "int4"), (2, "")], ids=["one rank, rounded base", "two ranks"]
)
def adapted(request, checkpoint, tmp_path_factory):
    """After a push of adapters that change every log-probability."""
    (tp_size, form), lora = request.param, groups.LoraConfig(lora_rank=4)
    directory, engine = tmp_path_factory.mktemp("lora"), {"rollout_weight_format": form}
    with running(
        make_engines(checkpoint, directory, "bfloat16", tp_size, lora=lora, **engine)
    ) as pair:
        requests = make_requests(8, seed=6, temperature=TEMPERATURE)
        before = pair.generate(requests)
        torch.manual_seed(0)
        with torch.no_grad():
            for adapter in adapters(pair.trainer.policy.module):
                adapter.B.to_local().normal_(std=0.02)
        pair.push_weights(1)
        yield pair, requests, before, pair.generate(requests)


def test_base_and_adapters_agree_bit_for_bit(adapted):
    pair, requests, before, after = adapted
    assert [c.rollout_log_probs for c in before] != [c.rollout_log_probs for c in after]
    assert count_mismatches(pair, requests, after) == 0


@pytest.mark.parametrize(
    "wrong", ["scale", "one layer left out", "one bit of B", "adapters in int4"]
)
def test_another_adapter_is_found(adapted, wrong):
    pair, requests, _, after = adapted
    policy = pair.trainer.policy.module
    first = next(adapters(policy))
    bits, scale = [x.B.detach().to_local().view(torch.int32) for x in adapters(policy)], first.scale
    kept = [x.clone() for x in bits]
    if wrong == "scale":
        first.scale *= 1.01
    elif wrong == "one layer left out":
        first.is_on = False
    elif wrong == "one bit of B":
        bits[0][0, 0] ^= 1 << 24
    else:
        for x in bits:
            x.copy_(round_weight(x.view(torch.float32), "int4").view(torch.int32))
    try:
        assert count_mismatches(pair, requests, after) > 0
    finally:
        first.scale, first.is_on = scale, True
        for x, before in zip(bits, kept, strict=True):
            x.copy_(before)


def test_a_base_that_is_not_rounded_on_one_side_is_found(adapted, checkpoint):
    pair, requests, _, after = adapted
    if not pair.contract.weight_format:
        return
    held = pair.trainer.policy.masters.held["causal_lm.model.layers.0.mlp.up_proj.weight"]
    rounded = held.detach().to_local().clone()
    stored = CheckpointReader(str(checkpoint)).read("model.layers.0.mlp.up_proj.weight", ())
    try:
        held.detach().to_local().copy_(stored)
        assert count_mismatches(pair, requests, after) > 0
    finally:
        held.detach().to_local().copy_(rounded)
    assert count_mismatches(pair, requests, after) == 0
