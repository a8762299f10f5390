"""Inputs of linears in FP8: scales of their own, the gradient, and which modules read them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.models import rounded_inputs
from onpolicy.models.align import AlignedLinear
from onpolicy.models.fused_layers import join_linears
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PackedTokens, empty_policy
from onpolicy.models.rounded_inputs import InputRounding, round_inputs
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.hopper import gemm
from onpolicy.ops.row_parallel import RowParallel
from onpolicy.weights.rounding import is_rounded, round_weight
from tests.support.bytes_on_cpu import SIZES, BytesOnCpu, stand_in
from tests.support.recorded_policies import record_trainer
from tests.support.tiny import ALL_ARCHITECTURES, make_checkpoint
from tests.support.tiny import SIZES as TINY


def rows(count, size, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=generator)
    return (x * 2.0 ** torch.arange(-3, count - 3)[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(count=st.integers(1, 9), blocks=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_nothing_but_its_own_numbers_decides_a_block(dtype, count, blocks, seed):
    """Of whatever batch it is, and on whichever tensor-parallel rank."""
    x = rows(count, 32, dtype, seed)
    whole = InputRounding("fp8_e4m3")(x, 32 // blocks)
    assert whole.dtype == dtype and whole.shape == x.shape
    largest = x.float().view(count, blocks, -1).abs().amax(-1, keepdim=True)
    error = (whole.float() - x.float()).view(count, blocks, -1).abs()
    assert (error <= (2**-4 + 2**-8) * largest).all()
    for part, rounded in zip(x.chunk(blocks, -1), whole.chunk(blocks, -1), strict=True):
        assert torch.equal(InputRounding("fp8_e4m3")(part[-1:]), rounded[-1:])


def test_blocks_and_rows_have_scales_of_their_own():
    x = rows(4, 32)
    one, two = (InputRounding("fp8_e4m3")(x, block) for block in (32, 16))
    assert not torch.equal(one, two) and not torch.equal(one, x)
    together = InputRounding("fp8_e4m3")(x.view(1, -1)).view(x.shape)
    assert not torch.equal(together, one)


def test_the_gradient_passes_straight_through_and_what_is_no_number_is_not_hidden():
    x = rows(4, 8, torch.float32).requires_grad_()
    weight = rows(4, 8, torch.float32, seed=1)
    (InputRounding("fp8_e4m3")(x) * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    with torch.no_grad():
        x[1, 2], x[3, 0] = torch.nan, torch.inf
        finite = InputRounding("fp8_e4m3")(x).isfinite().all(-1)
        assert finite.tolist() == [True, False, True, False]
        assert not InputRounding("fp8_e4m3")(torch.zeros(2, 8)).any()


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-moe"])
def test_each_input_is_rounded_once_and_heads_and_routers_read_what_they_did(
    tmp_path, monkeypatch, architecture
):
    """In a layer: what q, k and v read, o, gate and up, down; or experts, and their second product."""
    hf_config = load_config(str(make_checkpoint(tmp_path / "model", architecture)))
    policy = empty_policy(hf_config, CpuOperators())
    weights = {n: torch.randn(p.shape).mul(0.1) for n, p in policy.named_parameters()}
    policy.load_state_dict(weights, strict=False, assign=True)
    sizes, round_weight = [], rounded_inputs.round_weight

    def counted(x, weight_format):
        sizes.append(x.shape[1])
        return round_weight(x, weight_format)

    monkeypatch.setattr(rounded_inputs, "round_weight", counted)
    batch = PackedTokens.pack([[5, 6, 7, 8]], [[False] + [True] * 3], [[1.0] * 3])
    with torch.no_grad():
        before = policy(batch).log_probs
        round_inputs(policy, "", (AlignedLinear,))
        assert torch.equal(policy(batch).log_probs, before) and not sizes
        round_inputs(policy, "fp8_e4m3", (AlignedLinear,))
        assert not torch.equal(policy(batch).log_probs, before)
    hidden = hf_config.hidden_size
    heads = hf_config.num_attention_heads * hf_config.head_dim
    is_mixture = architecture == "qwen3-moe"
    inner = hf_config.moe_intermediate_size if is_mixture else hf_config.intermediate_size
    assert sizes == [hidden, heads, hidden, inner] * hf_config.num_hidden_layers


def model_of_bytes(architecture="qwen3"):
    """In bfloat16, weights and inputs rounded, each row-parallel linear in two blocks."""
    config_class, sizes = ALL_ARCHITECTURES[architecture]
    config = config_class(**{**TINY, **sizes, **SIZES})
    policy = empty_policy(config, BytesOnCpu(), row_parallel_blocks=2)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, parameter in policy.causal_lm.named_parameters():
        weight = torch.randn(parameter.shape, generator=generator).mul_(0.1).bfloat16()
        is_one = is_rounded(name, weight)
        weights[name] = round_weight(weight, "fp8_e4m3_block128") if is_one else weight
    policy.causal_lm.load_state_dict(weights, strict=False, assign=True)
    policy.causal_lm.tie_weights()
    round_inputs(policy, "fp8_e4m3", (AlignedLinear,))
    return policy


TOKENS = [[5, 9, 17, 4, 3], [7, 7, 30, 2]]


@torch.no_grad()
def scored(policy, sequences=TOKENS):
    ones = [1] * len(sequences)
    return policy(PackedTokens.after_prompts(sequences, ones, 0.7)).log_probs


def test_linears_multiply_bytes_and_the_head_does_not(monkeypatch):
    calls = stand_in(monkeypatch)
    policy = model_of_bytes()
    in_bytes = scored(policy)
    of_a_layer = ["q", "k", "v", "o", "o", "gate", "up", "down", "down"]  # two blocks of o and down
    assert len(calls) == len(of_a_layer) * len(policy.layers)
    policy.use(CpuOperators(1))
    assert not torch.equal(scored(policy), in_bytes)
    assert (
        scored(policy) - in_bytes
    ).abs().max() < 0.3  # products of the same numbers, otherwise rounded


def test_an_engine_that_joins_linears_and_holds_bytes_has_the_bits_of_a_trainer(monkeypatch):
    calls = stand_in(monkeypatch)
    trainer, engine = model_of_bytes(), model_of_bytes()
    together = scored(trainer)
    joint = join_linears(engine.causal_lm, engine.operators, lambda m: isinstance(m, AlignedLinear))
    assert len(joint) == 2 * len(engine.layers)
    split = RowParallel(2).split
    ends = [x for layer in engine.layers for x in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    weights = [each.weight for each in joint] + [part for x in ends for part in split(x.weight)]
    engine.operators.of_rounded.hold(weights)
    held = {made.numbers.data_ptr() for made in engine.operators.of_rounded._held.values()}
    calls.clear()
    alone = [scored(engine, [tokens]) for tokens in TOKENS]
    assert torch.equal(torch.cat(alone), together)
    assert {call.b[0].data_ptr() for call in calls} == held


def test_products_of_bytes_are_recorded_as_linears(monkeypatch):
    """By `onpolicy explain`, which puts a recorder around the operators."""
    stand_in(monkeypatch)
    policy = model_of_bytes()
    of_bytes = record_trainer(policy, TOKENS)
    policy.use(CpuOperators(1))
    in_bfloat16 = record_trainer(policy, TOKENS)
    assert list(of_bytes) == list(in_bfloat16)
    first = "layers.0.self_attn.q_proj", "linear", 0
    one, other = of_bytes[first][0], in_bfloat16[first][0]
    assert (one.inputs == other.inputs).all() and (one.outputs != other.outputs).any()


def test_an_input_scale_that_the_batch_decides_is_a_mismatch(monkeypatch):
    """The negative control of the above."""
    stand_in(monkeypatch)
    policy, right = model_of_bytes(), gemm.input_in_bytes

    def shared(x):
        made = right(x)
        return made._replace(scales=made.scales.fill_(float(made.scales.max())))

    monkeypatch.setattr(gemm, "input_in_bytes", shared)
    together = scored(policy)
    assert not torch.equal(torch.cat([scored(policy, [tokens]) for tokens in TOKENS]), together)
