"""Inputs of linears in 8 bits: scales of their own, the gradient, and which modules read them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.models import rounded_inputs
from onpolicy.models.align import AlignedLinear
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PackedTokens, empty_policy
from onpolicy.models.rounded_inputs import InputRounding, round_inputs
from onpolicy.ops.cpu import CpuOperators
from tests.support.tiny import make_checkpoint

FORMATS = {"int8": 127, "fp8_e4m3": 448}


def rows(count, size, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=generator)
    return (x * 2.0 ** torch.arange(-3, count - 3)[:, None]).to(dtype)


@pytest.mark.parametrize("activation_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(count=st.integers(1, 9), blocks=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_nothing_but_its_own_numbers_decides_a_block(activation_format, dtype, count, blocks, seed):
    """Of whatever batch it is, and on whichever tensor-parallel rank."""
    x = rows(count, 32, dtype, seed)
    whole = InputRounding(activation_format)(x, 32 // blocks)
    assert whole.dtype == dtype and whole.shape == x.shape
    largest = x.float().view(count, blocks, -1).abs().amax(-1, keepdim=True)
    close = 0.5 / 127 if activation_format == "int8" else 2**-4
    error = (whole.float() - x.float()).view(count, blocks, -1).abs()
    assert (error <= (close + 2**-8) * largest).all()
    for part, rounded in zip(x.chunk(blocks, -1), whole.chunk(blocks, -1), strict=True):
        assert torch.equal(InputRounding(activation_format)(part[-1:]), rounded[-1:])


def test_blocks_and_rows_have_scales_of_their_own():
    x = rows(4, 32)
    one, two = (InputRounding("fp8_e4m3")(x, block) for block in (32, 16))
    assert not torch.equal(one, two) and not torch.equal(one, x)
    together = InputRounding("fp8_e4m3")(x.view(1, -1)).view(x.shape)
    assert not torch.equal(together, one)


@pytest.mark.parametrize("activation_format", FORMATS)
def test_the_gradient_passes_straight_through_and_what_is_no_number_is_not_hidden(
    activation_format,
):
    x = rows(4, 8, torch.float32).requires_grad_()
    weight = rows(4, 8, torch.float32, seed=1)
    (InputRounding(activation_format)(x) * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    with torch.no_grad():
        x[1, 2], x[3, 0] = torch.nan, torch.inf
        finite = InputRounding(activation_format)(x).isfinite().all(-1)
        assert finite.tolist() == [True, False, True, False]
        assert not InputRounding(activation_format)(torch.zeros(2, 8)).any()


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-moe"])
def test_each_input_is_rounded_once_and_heads_and_routers_read_what_they_did(
    tmp_path, monkeypatch, architecture
):
    """In a layer: what q, k and v read, o, gate and up, down; or experts, and their second product."""
    hf_config = load_config(str(make_checkpoint(tmp_path / "model", architecture)))
    policy = empty_policy(hf_config, CpuOperators()).to_empty(device="cpu")
    sizes, round_weight = [], rounded_inputs.round_weight

    def counted(x, weight_format):
        sizes.append(x.shape[1])
        return round_weight(x, weight_format)

    monkeypatch.setattr(rounded_inputs, "round_weight", counted)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    batch = PackedTokens.pack([[5, 6, 7, 8]], [[False] + [True] * 3], [[1.0] * 3])
    with torch.no_grad():
        before = policy(batch).log_probs
        round_inputs(policy, "", (AlignedLinear,))
        assert torch.equal(policy(batch).log_probs, before) and not sizes
        round_inputs(policy, "int8", (AlignedLinear,))
        assert not torch.equal(policy(batch).log_probs, before)
    hidden = hf_config.hidden_size
    heads = hf_config.num_attention_heads * hf_config.head_dim
    is_mixture = architecture == "qwen3-moe"
    inner = hf_config.moe_intermediate_size if is_mixture else hf_config.intermediate_size
    assert sizes == [hidden, heads, hidden, inner] * hf_config.num_hidden_layers
