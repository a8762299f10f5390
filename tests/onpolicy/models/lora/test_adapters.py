"""Adapters beside linears and experts: their bits, their names, and what is refused."""

import copy
import dataclasses

import pytest
import torch

from onpolicy.config import TrainConfig, groups
from onpolicy.contract import AdapterShape
from onpolicy.errors import ConfigError
from onpolicy.models.align import AlignedLinear, align_modules
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.adapters import (
    ALL_LINEAR,
    LowRank,
    adapter_size,
    adapters,
    add_adapters,
    first_values,
    target_names,
    with_adapters,
    without_adapters,
)
from onpolicy.models.policy import empty_policy
from onpolicy.models.size import operator_shapes
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.row_parallel import WHOLE, RowParallel
from onpolicy.run.launch.contracts import adapter_of
from sglang_patches.engine_experts import _keep_part
from sglang_patches.engine_ranks import shard
from tests.support.ranks import on_ranks
from tests.support.tiny import make_checkpoint

SHAPE = AdapterShape(rank=4, scale=0.3, targets=("up_proj",))
OPERATORS = CpuOperators()


def make_linear(dtype=torch.bfloat16, shape=SHAPE, *, zero=False):
    """Adapted, and the same without."""
    torch.manual_seed(1)
    linear = torch.nn.Linear(48, 80, dtype=dtype)
    model = torch.nn.ModuleDict({"up_proj": AlignedLinear(linear, OPERATORS, WHOLE)})
    add_adapters(model, OPERATORS, shape)
    adapter = model["up_proj"].lora
    with torch.no_grad():
        adapter.A.normal_()
        adapter.B.zero_() if zero else adapter.B.normal_()
    return model["up_proj"], AlignedLinear(linear, OPERATORS, WHOLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtype):
    adapted, base = make_linear(dtype)
    x = torch.randn(37, 48, dtype=dtype)
    together = adapted(x)
    assert not torch.equal(together, base(x))
    for i in (0, 17, 36):
        assert torch.equal(adapted(x[i : i + 1]), together[i : i + 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zeros_leave_the_base_as_it_is(dtype):
    adapted, base = make_linear(dtype, zero=True)
    x = torch.randn(9, 48, dtype=dtype)
    assert torch.equal(adapted(x), base(x))


@pytest.mark.parametrize("wrong", ["scale", "order"])
def test_another_scale_or_order_has_other_bits(wrong, monkeypatch):
    adapted, _ = make_linear()
    x = torch.randn(64, 48, dtype=torch.bfloat16)
    right = adapted(x)
    if wrong == "scale":
        adapted.lora.scale *= 1.01
    else:

        def merged(adapter, x, out):
            return out + OPERATORS.linear(x, adapter.B @ adapter.A) * adapter.scale

        monkeypatch.setattr(LowRank, "forward", merged)
    assert not torch.equal(adapted(x), right)


def test_what_is_added_is_scaled_in_float32_and_the_sum_is_rounded_once():
    adapted, base = make_linear()
    x, adapter = torch.randn(64, 48, dtype=torch.bfloat16), adapted.lora
    out, added = base(x), OPERATORS.linear(OPERATORS.linear(x, adapter.A), adapter.B)
    assert torch.equal(adapted(x), (out.float() + added.float() * SHAPE.scale).bfloat16())
    assert not torch.equal(adapted(x), out + added * SHAPE.scale)


def test_only_adapters_ask_for_gradients_which_are_those_of_the_formula():
    adapted, _ = make_linear(torch.float32)
    assert {n for n, p in adapted.named_parameters() if p.requires_grad} == {"lora.A", "lora.B"}
    x, grad = torch.randn(6, 48), torch.randn(6, 80)
    adapted(x).backward(grad)
    a, b = adapted.lora.A, adapted.lora.B
    assert torch.allclose(b.grad, SHAPE.scale * grad.T @ (x @ a.detach().T), atol=1e-4)
    assert torch.allclose(a.grad, SHAPE.scale * (grad @ b.detach()).T @ x, atol=1e-4)
    assert adapted.weight.grad is None


def one_of_two_ranks(linear, adapter, shared):
    """What each of two ranks computes of all columns of x, which share K or N of a linear."""

    def result(rank):
        ours = torch.nn.Linear(1, 1, bias=False)
        axis = 1 if shared == "K" else 0
        ours.weight = torch.nn.Parameter(linear.weight.chunk(2, axis)[rank])
        how = RowParallel(2, torch.distributed.group.WORLD) if shared == "K" else WHOLE
        module = torch.nn.ModuleDict({"up_proj": AlignedLinear(ours, OPERATORS, how)})
        add_adapters(module, OPERATORS, SHAPE)
        for name, held in module["up_proj"].lora.state_dict().items():
            held.copy_(shard(adapter.state_dict()[name], held, rank))
        x = X.chunk(2, -1)[rank] if shared == "K" else X
        return module["up_proj"](x.clone())

    return result


X = torch.randn(37, 48)


@pytest.mark.parametrize("shared", ["K", "N"])
def test_ranks_that_share_a_linear_have_the_bits_of_one(shared):
    torch.manual_seed(1)
    linear = torch.nn.Linear(48, 80, bias=False)
    how = RowParallel(2) if shared == "K" else WHOLE
    model = torch.nn.ModuleDict({"up_proj": AlignedLinear(linear, OPERATORS, how)})
    add_adapters(model, OPERATORS, SHAPE)
    adapter = model["up_proj"].lora
    with torch.no_grad():
        for held in adapter.state_dict().values():
            held.normal_()
        one = model["up_proj"](X)
        first, second = on_ranks(2, one_of_two_ranks(linear, adapter, shared))
        assert torch.equal(torch.cat([first, second], -1) if shared == "N" else first, one)
        assert shared == "N" or torch.equal(second, one)
        adapter.row_parallel = RowParallel(4)
        assert not torch.equal(model["up_proj"](X), one)


def test_products_with_adapters_are_checked_where_they_are_called(checkpoint):
    facts = ModelFacts(load_config(str(checkpoint)))
    adapter = AdapterShape(rank=4, scale=1.0, targets=("down_proj", "q_proj"))
    for blocks, row_parallel in ((1, False), (2, True)):
        shapes = with_adapters(operator_shapes(facts, blocks), facts.model, adapter, blocks)
        assert {(4, 96, False), (192, 4, False), (96, 4, False)} <= set(shapes.linear)
        assert ((4, 208, False) in shapes.linear) is not row_parallel
        assert ((4, 208, False) in shapes.row_linear) is row_parallel


@pytest.mark.parametrize("rank", [48, 47])
def test_of_full_rank_a_step_is_that_of_the_whole_weight(rank):
    """With B = 0 and A orthogonal, a step of SGD moves s B A by s^2 times that of W; one dimension less
    leaves a part of it out."""
    shape = AdapterShape(rank=rank, scale=0.5, targets=("up_proj",))
    adapted, base = make_linear(torch.float32, shape, zero=True)
    with torch.no_grad():
        adapted.lora.A.copy_(torch.linalg.qr(torch.randn(48, 48))[0][:rank])
    base.weight = torch.nn.Parameter(base.weight.detach().clone())  # the adapted one's is frozen
    x, target = torch.randn(64, 48), torch.randn(64, 80)
    before = base(x).detach()
    for linear, trained, lr in ((base, base.weight, 0.5), (adapted, adapted.lora.B, 2.0)):
        torch.nn.functional.mse_loss(linear(x), target, reduction="sum").div(64).backward()
        torch.optim.SGD([trained], lr=lr).step()
    with torch.no_grad():
        difference = (adapted(x) - base(x)).abs().max()
        moved = (base(x) - before).abs().max()
    assert moved > 1
    assert (difference < 1e-5 * moved) == (rank == 48)


def test_first_values_depend_on_seed_and_name_alone():
    shape = torch.Size((4, 48))
    values = first_values("x.lora.A", shape, 3)
    assert torch.equal(values, first_values("x.lora.A", shape, 3))
    assert not torch.equal(values, first_values("y.lora.A", shape, 3))
    assert not torch.equal(values, first_values("x.lora.A", shape, 4))
    assert 0.9 < values.abs().max() * 48**0.5 < 1
    assert not first_values("x.lora.B", shape, 3).any()


@pytest.fixture
def model(checkpoint):
    return ModelFacts(load_config(str(checkpoint))).model


def test_all_linear_is_every_linear_but_the_output_projection(model):
    linears = "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"
    assert target_names(model, ALL_LINEAR) == linears
    assert target_names(model, "v_proj, q_proj") == ("q_proj", "v_proj")
    assert target_names(model, "lm_head,q_proj") == ("lm_head", "q_proj")


def test_an_output_projection_that_is_the_embedding_is_refused(tmp_path):
    tied = ModelFacts(load_config(str(make_checkpoint(tmp_path / "tied", "qwen3-tied")))).model
    with pytest.raises(ConfigError, match="'lm_head' shares its weight with the input embedding"):
        target_names(tied, "q_proj,lm_head")


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ("query", "'query' is no module of this model"),
        ("q_norm", "'q_norm' is not a plain linear"),
        ("q_proj,", "is no module of"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(model, asked, rule):
    with pytest.raises(ConfigError, match=rule):
        target_names(model, asked)


def test_a_model_without_what_the_contract_names_is_refused():
    model = torch.nn.ModuleDict({"other": torch.nn.Linear(4, 4)})
    with pytest.raises(ConfigError, match="has no up_proj"):
        add_adapters(model, OPERATORS, SHAPE)


def test_their_size_is_counted_before_they_are_made():
    model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(48, 80)})
    counted = adapter_size(model, SHAPE)
    add_adapters(model, OPERATORS, SHAPE)
    assert counted == sum(p.numel() for p in model["up_proj"].lora.parameters())


def test_without_a_rank_there_are_none(model):
    facts = ModelFacts(model.config)
    config = dataclasses.replace(TrainConfig(), lora=groups.LoraConfig(lora_rank=2))
    assert adapter_of(config, facts).rank == 2
    assert adapter_of(TrainConfig(), facts) is None


OF_EXPERTS = AdapterShape(rank=4, scale=0.3, targets=("experts",))
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
    add_adapters(model, OPERATORS, OF_EXPERTS)
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
    return weight + OF_EXPERTS.scale * b.flatten(1, -2) @ a


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
