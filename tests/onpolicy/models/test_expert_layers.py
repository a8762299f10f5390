"""Experts and routers of many architectures, and the code that has to recognise them."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    JetMoeConfig,
)

from onpolicy.errors import ConfigError, ContractError
from onpolicy.models import stored
from onpolicy.models.align import align_modules
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.expert_layers import AlignedExperts, route_by_operators
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import require_alignable
from onpolicy.models.policy import empty_policy
from onpolicy.models.size import operator_shapes
from onpolicy.models.stored import stored_tensors
from onpolicy.ops.cpu import CpuOperators
from tests.support.tiny import EXPERT_ARCHITECTURES, LATENT_ATTENTION, SIZES, make_checkpoint

ROUTERS = (
    "ernie4.5-moe",  # a correction in a module of its own
    "qwen2-moe",  # a shared expert behind a gate, with a sigmoid of the block's own
    "olmoe",
    "minimax-m2",  # the block keeps the correction and gives it to its router
    "deepseek-v2",  # a linear whose weight the block reads
    "deepseek-v3",  # float32 scores, routing in the block
    "gpt-oss",  # biases, transposed weights, a gate of its own, softmax over the chosen
    "llama4",  # every expert computes every token, in a form that is rewritten
    *EXPERT_ARCHITECTURES,
)


@pytest.fixture(scope="module", params=ROUTERS)
def path(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


def blocks_of(model):
    """The expert blocks of a model as they are, and the same ones by the operators."""
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    aligned = empty_policy(AutoConfig.from_pretrained(model), CpuOperators(1)).causal_lm
    aligned.load_state_dict(stock.state_dict(), strict=False, assign=True)
    return [
        (stock.get_submodule(name), module)
        for name, module in aligned.named_modules()
        if any(isinstance(child, AlignedExperts) for child in module.children())
    ]


@torch.no_grad()
def test_blocks_compute_what_transformers_computes_token_by_token(path):
    x = torch.randn(1, 90, 96, generator=torch.Generator().manual_seed(0))
    for stock, aligned in blocks_of(path):
        require_alone_as_together(aligned, x)
        torch.testing.assert_close(hidden(aligned(x)), hidden(stock(x)), rtol=1e-4, atol=1e-5)


def hidden(result):
    """A block's hidden states [1, T, H]; some return what their router said too, Llama-4's [T, H]."""
    states = result[0] if isinstance(result, tuple) else result
    return states.view(1, -1, states.shape[-1])


def require_alone_as_together(block, x):
    whole = hidden(block(x))
    for part in (slice(0, 1), slice(7, 20), slice(40, 90)):
        assert torch.equal(hidden(block(x[:, part])), whole[:, part])


@torch.no_grad()
def test_blocks_in_bfloat16_compute_token_by_token(path):
    x = torch.randn(1, 90, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    for _, aligned in blocks_of(path):
        require_alone_as_together(aligned.bfloat16(), x)


@torch.no_grad()
def test_routing_by_groups_that_transformers_cannot_run_is_run():
    config = DeepseekV2Config(
        **{**SIZES, **LATENT_ATTENTION, "topk_method": "group_limited_greedy"}
    )
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config)
    aligned = empty_policy(config, CpuOperators(1)).causal_lm
    aligned.load_state_dict(stock.state_dict(), assign=True)
    block, stock = aligned.model.layers[1].mlp, stock.model.layers[1].mlp
    x = torch.randn(1, 90, 96, generator=torch.Generator().manual_seed(0))
    require_alone_as_together(block, x)
    stock.num_experts = config.n_routed_experts
    torch.testing.assert_close(block(x), stock(x), rtol=1e-4, atol=1e-5)


def test_a_checkpoint_is_made_of_views_of_the_model_under_its_own_names(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    views = {}
    for name, tensor in model.state_dict().items():
        for key, view in stored_tensors(model, name, tensor).items():
            assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            views[key] = view
    on_disk = load_file(path / "model.safetensors")
    assert views.keys() == on_disk.keys()
    assert all(torch.equal(views[name], tensor) for name, tensor in on_disk.items())


def test_a_later_tensor_is_cut_as_the_first_of_its_layout_was(path, monkeypatch):
    """Without transformers, which goes through all of the model for each; as in a second push."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    first = [stored_tensors(model, *item) for item in model.state_dict().items()]
    monkeypatch.delattr(stored, "revert_weight_conversion")
    for before, (name, tensor) in zip(first, model.state_dict().items(), strict=True):
        gathered = torch.cat([torch.zeros_like(tensor), 2 * tensor])[len(tensor) :]
        again = stored_tensors(model, name, gathered)
        assert again.keys() == before.keys()
        assert all(torch.equal(again[key], 2 * before[key]) for key in before)
    with pytest.raises(NameError):
        stored_tensors(model, name, torch.zeros(3, 5))


def test_shapes_for_the_self_check_are_the_models(path):
    config = AutoConfig.from_pretrained(path)
    shapes = operator_shapes(ModelFacts(config))
    [(num_experts, intermediate, hidden, k)] = shapes.experts
    assert (intermediate, hidden, k) == (72, 96, config.num_experts_per_tok)
    assert (num_experts, 96, config.model_type == "gpt_oss") in shapes.linear


def test_experts_of_another_layout_are_refused_by_name():
    config = JetMoeConfig(num_hidden_layers=1, architectures=["JetMoeForCausalLM"])
    problem = "num_local_experts=8 in JetMoeParallelExperts: only experts that transformers"
    with pytest.raises(ConfigError, match=problem):
        require_alignable(ModelFacts(config), 128)


class Block(nn.Module):
    """Everything that routers do, in all spellings that transformers has."""

    def forward(self, x, weight, dim=-1):
        logits = F.linear(x, weight)
        groups = logits.view(len(x), 2, -1)
        return [
            logits, F.softmax(logits, dim=dim, dtype=torch.float32), torch.softmax(logits, dim),
            logits.softmax(dim), logits.sigmoid(), torch.sigmoid(logits), F.silu(logits),
            F.gelu(logits, approximate="tanh"), *torch.topk(logits, 2, dim=-1, sorted=False),
            groups.topk(2, dim=-1)[0],
        ]  # fmt: skip


class Recorded(CpuOperators):
    """Notes which operators were called."""

    def __getattribute__(self, name):
        if name in ("linear", "softmax", "elementwise", "topk"):
            self.calls.append(name)
        return super().__getattribute__(name)

    def __init__(self):
        self.calls = []
        super().__init__(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_functions_of_a_router_are_the_operators(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 96, generator=generator).to(dtype) for n in (40, 6))
    operators, block = Recorded(), Block()
    want = block(x, weight)
    assert not operators.calls
    route_by_operators(block, operators)
    got = block(x, weight)
    kinds = ["linear", *["softmax"] * 3, *["elementwise"] * 4, *["topk"] * 2]
    assert operators.calls == kinds
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert F.linear(x, weight) is not None and operators.calls == kinds  # only inside the block


def test_a_router_along_another_axis_is_refused():
    block = Block()
    route_by_operators(block, CpuOperators(1))
    with pytest.raises(ContractError, match=r"operator=softmax, dim=0, shape=\(4, 6\)"):
        block(torch.ones(4, 96), torch.ones(6, 96), dim=0)


def test_what_corrects_a_router_is_float32_in_whatever_dtype_a_model_was_built(tmp_path):
    """SGLang builds models in the dtype it serves, and a rounded correction chooses other experts."""
    config = AutoConfig.from_pretrained(make_checkpoint(tmp_path, "dots1"))
    config.dtype = torch.bfloat16
    model = empty_causal_lm(config, trust_remote_code=False)
    align_modules(model, CpuOperators(1))
    corrections = [b for name, b in model.named_buffers() if "e_score" in name]
    assert corrections and all(b.dtype == torch.float32 for b in corrections)
