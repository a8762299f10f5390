"""Adapters of a mixture's experts: their bits, their gradients, their names, and their number."""

import copy
import dataclasses

import pytest
import torch

from onpolicy.config import TrainConfig, groups
from onpolicy.contract import AdapterShape
from onpolicy.errors import ConfigError
from onpolicy.models.align import align_modules
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.adapters import (
    ALL_LINEAR,
    adapter_size,
    adapters,
    add_adapters,
    target_names,
    without_adapters,
)
from onpolicy.models.policy import empty_policy
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.row_parallel import RowParallel
from onpolicy.run.launch.adapters import adapter_of
from sglang_patches.experts import _keep_part
from sglang_patches.tensor_parallel import shard
from tests.support.ranks import on_ranks
from tests.support.tiny import make_checkpoint

SHAPE = AdapterShape(rank=4, scale=0.3, targets=("experts",))
OPERATORS = CpuOperators()
TOKENS, CHOSEN = 37, 2


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("moe")
    return {
        name: ModelFacts(load_config(str(make_checkpoint(directory / name, name))))
        for name in ("qwen3-moe", "glm4-moe", "qwen2-moe", "gpt-oss")
    }


def draw(facts, name):
    """The experts of a layer, drawn at random, in float32."""
    model = copy.deepcopy(facts[name].model)
    found = model.model.layers[0].mlp.experts.to_empty(device="cpu")
    torch.manual_seed(1)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return found


@pytest.fixture
def experts(facts):
    return draw(facts, "qwen3-moe")


def adapted(experts, row_parallel=None, dtype=torch.float32):
    """With factors that change everything."""
    model = torch.nn.ModuleDict({"experts": copy.deepcopy(experts).to(dtype)})
    align_modules(model, OPERATORS, row_parallel or RowParallel())
    add_adapters(model, OPERATORS, SHAPE)
    torch.manual_seed(2)
    for parameter in model["experts"].lora.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model["experts"]


def inputs(dtype=torch.float32):
    torch.manual_seed(3)
    weights, chosen = torch.randn(TOKENS, 6).softmax(-1).topk(CHOSEN)
    return torch.randn(TOKENS, 96).to(dtype), chosen, weights.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_a_token_has_the_same_bits_alone_and_those_of_the_base_without(experts, dtype):
    ours, given = adapted(experts, dtype=dtype), inputs(dtype)
    together = ours(*given)
    for i in (0, 17, 36):
        assert torch.equal(ours(*(x[i : i + 1] for x in given)), together[i : i + 1])
    with without_adapters(ours):
        base = ours(*given)
    assert not torch.equal(together, base)
    for part in (ours.lora.gate_up, ours.lora.down):
        part.B.zero_()
    assert torch.equal(ours(*given), base)


def merged_with(weight, pair):
    """W + s B A of all experts; pair: A and B, in float64."""
    a, b = pair
    return weight + SHAPE.scale * b.flatten(1, -2) @ a


def test_only_adapters_have_gradients_which_are_those_of_merged_weights(experts):
    ours, (x, *choice) = adapted(experts), inputs()
    merged = copy.deepcopy(experts).double()
    factors = [p.detach().double().requires_grad_() for p in ours.lora.parameters()]
    half = len(factors) // 2
    weights = {
        "gate_up_proj": merged_with(merged.gate_up_proj, factors[:half]),
        "down_proj": merged_with(merged.down_proj, factors[half:]),
    }
    chosen, scores = choice
    want = torch.func.functional_call(merged, weights, (x.double(), chosen, scores.double()))
    got = ours(x, chosen, scores)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    grad = torch.randn(got.shape)
    got.backward(grad)
    for parameter, theirs in zip(
        ours.lora.parameters(), torch.autograd.grad(want, factors, grad.double()), strict=True
    ):
        torch.testing.assert_close(parameter.grad.double(), theirs, rtol=1e-4, atol=1e-4)
    assert ours.gate_up_proj.grad is None and ours.down_proj.grad is None


@torch.no_grad()
def test_ranks_that_share_the_intermediate_axis_have_the_bits_of_one(experts):
    whole, given = adapted(experts, RowParallel(2)), inputs()

    @torch.no_grad()
    def of_rank(rank):
        part = copy.deepcopy(experts)
        _keep_part(part, 2)
        ours = adapted(part, RowParallel(2, torch.distributed.group.WORLD))
        gate_up = whole.gate_up_proj.unflatten(1, (2, -1))
        ours.gate_up_proj.copy_(gate_up.chunk(2, 2)[rank].flatten(1, 2))
        ours.down_proj.copy_(whole.down_proj.chunk(2, 2)[rank])
        for name, held in ours.lora.state_dict().items():
            held.copy_(shard(whole.lora.state_dict()[name], held, rank))
        return ours(*given)

    one = whole(*given)
    for found in on_ranks(2, of_rank):
        assert torch.equal(found, one)
    whole.row_parallel = RowParallel(4)
    assert not torch.equal(whole(*given), one)


def test_all_linear_is_experts_and_shared_ones_and_no_router(facts):
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    mlp = {"gate_proj", "up_proj", "down_proj"}
    names = {name: set(target_names(each.model, ALL_LINEAR)) for name, each in facts.items()}
    assert names["qwen3-moe"] == attention | {"experts"}
    assert names["glm4-moe"] == names["qwen2-moe"] == attention | mlp | {"experts"}
    for router in ("gate", "shared_expert_gate"):
        with pytest.raises(ConfigError, match=f"'{router}' chooses experts, and stays as it is"):
            target_names(facts["qwen2-moe"].model, f"q_proj,{router}")


def test_targets_that_peft_would_take_for_experts_are_refused_without_them(facts):
    def of(targets):
        flags = groups.LoraConfig(lora_rank=2, lora_target_modules=targets)
        return adapter_of(dataclasses.replace(TrainConfig(), lora=flags), facts["glm4-moe"])

    with pytest.raises(ConfigError, match="PEFT takes up_proj of a mixture for its experts"):
        of("q_proj,up_proj")
    assert of("experts,up_proj").targets == ("experts", "up_proj")
    assert of("q_proj").targets == ("q_proj",)


def test_numbers_of_adapters_are_counted_without_making_them(facts):
    model = facts["glm4-moe"].model
    targets = target_names(model, ALL_LINEAR)
    shape = AdapterShape(rank=4, scale=1.0, targets=targets)
    policy = empty_policy(facts["glm4-moe"].config, OPERATORS, adapter=shape)
    made = sum(p.numel() for adapter in adapters(policy) for p in adapter.parameters())
    assert adapter_size(model, shape) == made
