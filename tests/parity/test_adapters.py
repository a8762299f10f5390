"""A real engine and a real trainer with the same adapters, and with others."""

import pytest
import torch

from onpolicy.config import groups
from onpolicy.models.adapters import adapters
from onpolicy.models.expert_adapters import ExpertLowRank
from tests.parity.test_negative_controls import TEMPERATURE, count_mismatches
from tests.support.engines_fixture import make_engines, make_requests, running
from tests.support.tiny import make_checkpoint

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=["a dense model", "a mixture on two ranks"])
def adapted(request, checkpoint, tmp_path_factory):
    """After a push of adapters that change every log-probability."""
    directory = tmp_path_factory.mktemp("lora")
    targets, ranks = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head", 1
    if request.param == "a mixture on two ranks":  # with a dense layer and shared experts, too
        checkpoint = make_checkpoint(directory / "glm4-moe", "glm4-moe")
        targets, ranks = f"{targets},experts", 2
    lora = groups.LoraConfig(lora_rank=4, lora_target_modules=targets)
    with running(make_engines(checkpoint, directory, "bfloat16", ranks, lora=lora)) as pair:
        requests = make_requests(8, seed=6, temperature=TEMPERATURE)
        before = pair.generate(requests)
        torch.manual_seed(0)
        with torch.no_grad():
            for adapter in adapters(pair.trainer.policy.module):
                for name, factor in adapter.named_parameters():
                    if name.endswith("B"):
                        factor.to_local().normal_(std=0.02)
        pair.push_weights(1)
        yield pair, requests, before, pair.generate(requests)


def test_base_and_adapters_agree_bit_for_bit(adapted):
    pair, requests, before, after = adapted
    assert [c.rollout_log_probs for c in before] != [c.rollout_log_probs for c in after]
    assert count_mismatches(pair, requests, after) == 0


@pytest.mark.parametrize("wrong", ["scale", "one bit of B", "first", "experts", "head"])
def test_another_adapter_is_found(adapted, wrong):
    """Or one that is left out: the first, a mixture's, the head's."""
    pair, requests, _, after = adapted
    every = list(adapters(pair.trainer.policy.module))
    of_experts = [adapter for adapter in every if isinstance(adapter, ExpertLowRank)]
    left_out = {"first": every[0], "experts": [every[1], *of_experts][-1], "head": every[-1]}.get(
        wrong
    )
    first = every[0]
    bits = first.B.detach().to_local().view(torch.int32)
    kept = first.scale, bits.clone()
    if wrong == "scale":
        first.scale *= 1.01
    elif left_out is not None:
        left_out.is_on = False
    else:
        bits[0, 0] ^= 1 << 24
    try:
        assert count_mismatches(pair, requests, after) > 0
    finally:
        first.scale = kept[0]
        for adapter in every:
            adapter.is_on = True
        bits.copy_(kept[1])
