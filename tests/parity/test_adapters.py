"""A real engine and a real trainer with the same adapters, and with others."""

import pytest
import torch

from onpolicy.config import groups
from onpolicy.models.lora.adapters import ExpertLowRank, adapters
from onpolicy.models.weight_files import CheckpointReader
from onpolicy.weights.rounding import round_weight
from tests.parity.test_negative_controls import TEMPERATURE, count_mismatches
from tests.support.engines_fixture import make_engines, make_requests, running
from tests.support.tiny import make_checkpoint
from tests.support.violations import always, break_operator

pytestmark = pytest.mark.engine


PARAMS = ["a rounded dense base", "a mixture in float16 on two ranks", "in float32 on two ranks"]


@pytest.fixture(scope="module", params=PARAMS)
def adapted(request, checkpoint, tmp_path_factory):
    """After a push of adapters that change every log-probability."""
    directory = tmp_path_factory.mktemp("lora")
    targets, ranks = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head", 1
    if "mixture" in request.param:  # with a dense layer and shared experts, too
        checkpoint = make_checkpoint(directory / "glm4-moe", "glm4-moe")
        targets, ranks = f"{targets},experts", 2
    dtype = "float16" if "float16" in request.param else "bfloat16"
    lora = groups.LoraConfig(lora_rank=4, lora_target_modules=targets)
    if "float32" in request.param:  # which rounds no last bit away
        dtype, ranks = "float32", 2
    engine = {"lora": lora}
    if request.param == "a rounded dense base":
        engine["rollout_weight_format"] = "int4"
    with running(make_engines(checkpoint, directory, dtype, ranks, **engine)) as pair:
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


def test_sums_with_adapters_off_by_one_bit_are_found(adapted, monkeypatch):
    pair, requests, _, after = adapted
    operators = pair.trainer.operators
    monkeypatch.setattr(operators, "add_scaled", operators.add_scaled)
    break_operator(operators, "add_scaled", always)
    assert count_mismatches(pair, requests, after) > 0


@pytest.mark.parametrize("wrong", ["base as it was", "adapters in int4"])
def test_rounding_on_one_side_alone_is_found(adapted, checkpoint, wrong):
    pair, requests, _, after = adapted
    if not pair.contract.weight_format:
        return
    held, name = pair.trainer.policy.masters.held, "model.layers.0.mlp.up_proj"
    if wrong == "base as it was":
        changed = held[f"causal_lm.{name}.weight"].detach().to_local()
        other = CheckpointReader(str(checkpoint)).read(f"{name}.weight", ())
    else:
        changed = held[f"causal_lm.{name}.lora.B"].detach().to_local()
        other = round_weight(changed, "int4")
    kept = changed.clone()
    try:
        changed.copy_(other)
        assert count_mismatches(pair, requests, after) > 0
    finally:
        changed.copy_(kept)
    assert count_mismatches(pair, requests, after) == 0
