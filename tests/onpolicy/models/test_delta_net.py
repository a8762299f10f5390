"""Gated delta networks in a model: against transformers' own, what is known of them, and look-alikes."""

from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from onpolicy.contract import DeltaShape
from onpolicy.errors import ConfigError, ContractError
from onpolicy.models.align import align_modules, unaligned_modules
from onpolicy.models.delta_net import delta_nets, is_delta_net
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import require_alignable
from onpolicy.models.policy import PackedTokens
from onpolicy.models.shared_prefixes import share_prefixes
from onpolicy.models.size import operator_shapes
from onpolicy.ops import make_operators
from onpolicy.ops.cpu import CpuOperators
from tests.onpolicy.models.test_policy import load_policy
from tests.support.tiny import SIZES, make_checkpoint
from tests.support.tiny_contract import CONTRACT

ARCHITECTURES = ("qwen3-next", "qwen3.5", "qwen3.5-moe")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


def tokens(count, seed=0):
    return torch.randint(2, 137, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_model_computes_what_transformers_computes(path):
    sequence = tokens(150)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([sequence])).logits[0, :-1]
        got = load_policy(path)(PackedTokens.after_prompts([sequence], [1], 1.0))[0]
    want = logits.log_softmax(-1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_its_sizes_are_in_the_contract(path):
    facts = ModelFacts(AutoConfig.from_pretrained(path))
    shapes, config = operator_shapes(facts), facts.config
    assert shapes.delta == (
        DeltaShape(
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            kernel_size=4,
        ),
    )
    assert config.linear_value_head_dim in shapes.norm
    assert len(facts.attention) == config.layer_types.count("full_attention")


def test_other_chunks_are_another_version():
    shapes = replace(CONTRACT.shapes, delta=(replace(CONTRACT.shapes.delta[0], chunk=32),))
    with pytest.raises(ContractError, match="chunk=32: the gated delta rule of this version"):
        make_operators(replace(CONTRACT, shapes=shapes))


class Recorded(CpuOperators):
    """Operators that note the arguments of the rule, and the shapes of sigmoids."""

    def __init__(self):
        super().__init__(1)
        self.decays, self.sigmoids = [], []

    def gated_delta(self, q, k, v, g, beta, layout, states=None):
        self.decays.append(g)
        return super().gated_delta(q, k, v, g, beta, layout, states)

    def elementwise(self, function, x):
        self.sigmoids += [tuple(x.shape)] if function is torch.sigmoid else []
        return super().elementwise(function, x)


def test_the_gate_of_attention_is_an_operator(path):
    operators = Recorded()
    policy = load_policy(path, operators)
    policy(PackedTokens.after_prompts([tokens(9)], [1], 1.0))
    assert (1, 9, 4 * 16) in operators.sigmoids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decays_are_float32_whatever_the_dtype(path, dtype):
    """vllm-project/vllm pull request 37810, NVIDIA-NeMo/Automodel 2484: exp(A_log) in half precision."""
    operators = Recorded()
    policy = load_policy(path, operators, dtype)
    (net, *_) = delta_nets(policy)
    nn.init.constant_(net.A_log, 12.0)  # its exponential is no float16
    policy(PackedTokens.after_prompts([tokens(9)], [1], 1.0))
    (decays, *_) = operators.decays
    assert decays.dtype == torch.float32 and decays.isfinite().all() and (decays < 0).all()


def test_gradients_of_shared_prefixes_are_sums(path):
    start = tokens(70)
    group = [[*start, 9, 8], [*start, 9, 8, 7, 6], [*start, 30]]
    batch, grads = PackedTokens.after_prompts(group, [60] * 3, 1.0), []
    for each in (batch, share_prefixes(batch)):
        policy = load_policy(path)
        policy(each)[0].sum().backward()
        grads.append([x.grad for x in policy.parameters() if x.grad is not None])
    for shared, apart in zip(*grads, strict=True):
        torch.testing.assert_close(shared, apart, rtol=1e-3, atol=1e-4 * apart.abs().max().item())


def test_a_call_without_the_layout_is_refused(path):
    policy = load_policy(path)
    (net, *_) = delta_nets(policy)
    with pytest.raises(ContractError, match="needs the keyword `recurrence`"):
        net(torch.zeros(1, 3, 96))


class Qwen3NextGatedDeltaNet(nn.Module):
    """Has the name, and is none of transformers' own."""


def test_a_look_alike_is_not_replaced():
    assert not is_delta_net(Qwen3NextGatedDeltaNet())
    model = nn.ModuleDict({"layer": Qwen3NextGatedDeltaNet()})
    model.layer.A_log = nn.Parameter(torch.zeros(2))
    align_modules(model, CpuOperators(1))
    assert "forward" not in vars(model.layer)
    assert unaligned_modules(model, ()) == ["Qwen3NextGatedDeltaNet"]


def test_a_network_with_negative_eigenvalues_is_refused_by_name():
    sizes = {**SIZES, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = hf.OlmoHybridConfig(**sizes, architectures=["OlmoHybridForCausalLM"])
    with pytest.raises(ConfigError, match=r"OlmoHybridForCausalLM, which has linear attention"):
        require_alignable(ModelFacts(config), 256)
