"""What is pushed to an engine is what it holds, or the push fails."""

from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, Qwen3MoeConfig

from onpolicy.errors import ContractError, WeightSyncError
from sglang_patches import pushed_weights, registry
from tests.support.tiny import make_checkpoint

CORRECTION = "model.layers.1.mlp.gate.e_score_correction_bias"
"""A buffer that checkpoints hold, in float32 whatever the dtype of the weights."""

NORM = "model.norm.weight"

NARROW, WHOLE = torch.bfloat16, torch.float32


class Engine(nn.Module):
    def __init__(self, path, held_as):
        super().__init__()
        self.model = AutoModel.from_pretrained(path, dtype=torch.bfloat16)
        gate = self.model.get_submodule(CORRECTION.removeprefix("model.").rpartition(".")[0])
        gate.e_score_correction_bias = gate.e_score_correction_bias.to(held_as)

    def load_weights(self, pushed):
        for name, tensor in pushed:
            self.state_dict()[name].copy_(tensor)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """SGLang's own groups, and what the plug-in reports, exist in a server only."""
    monkeypatch.setattr(pushed_weights, "rank", lambda: 0)
    monkeypatch.setattr(registry, "report", {})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "glm4-moe")


def push(engine, rounds):
    pushed_weights.watch_loads(engine, rounds=rounds)
    held = engine.state_dict()
    correction = torch.full(held[CORRECTION].shape, 1.0001)  # which bfloat16 rounds
    engine.load_weights([(NORM, torch.full_like(held[NORM], 0.5)), (CORRECTION, correction)])


@pytest.mark.parametrize(("held_as", "rounds"), [(WHOLE, False), (WHOLE, True), (NARROW, True)])
def test_what_an_engine_holds_in_its_way_is_accepted(path, held_as, rounds):
    engine = Engine(path, held_as)
    push(engine, rounds)
    assert registry.told()["weights"] and engine.model.norm.weight[0] == 0.5


def test_an_aligned_engine_that_rounds_what_was_pushed_is_refused(path):
    with pytest.raises(WeightSyncError, match=f"parameter={CORRECTION}: .* does not hold the bits"):
        push(Engine(path, NARROW), rounds=False)


@pytest.mark.parametrize("rounds", [False, True])
def test_a_loader_that_leaves_an_old_weight_is_refused(path, rounds, monkeypatch):
    monkeypatch.setattr(Engine, "load_weights", lambda self, pushed: list(pushed))
    with pytest.raises(WeightSyncError, match=f"parameter={NORM}: .* does not hold the bits"):
        push(Engine(path, WHOLE), rounds)


def test_a_loader_that_keeps_the_memory_of_a_push_is_refused(path, monkeypatch):
    def load_weights(self, pushed):
        for name, tensor in pushed:
            self.get_parameter(name).data = tensor

    monkeypatch.setattr(Engine, "load_weights", load_weights)
    engine = Engine(path, WHOLE)
    pushed_weights.watch_loads(engine, rounds=False)
    with pytest.raises(WeightSyncError, match=f"parameter={NORM}: .*keeps the memory"):
        engine.load_weights([(NORM, torch.ones_like(engine.model.norm.weight))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("start", [0, 1, 8])
@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (8, 8), (0, 2)])
def test_one_bit_anywhere_is_another_tensor(dtype, start, shape):
    generator = torch.Generator().manual_seed(0)
    numel = torch.Size(shape).numel()
    data = torch.randint(256, ((start + numel) * dtype.itemsize,), generator=generator)
    data = data.to(torch.uint8)
    a, b = (data.clone().view(dtype)[start:].view(shape) for _ in range(2))
    assert pushed_weights._same_bits(a, b) and not pushed_weights._same_bits(a, a[None])
    bits = b.view(-1).view(torch.uint8)
    for place in range(len(bits)):
        bits[place] ^= 1
        assert not pushed_weights._same_bits(a, b)
        bits[place] ^= 1


def test_zeros_of_either_sign_are_not_the_same_bits_and_a_nan_is():
    zero, nan = torch.zeros(4), torch.full((4,), torch.nan)
    assert not pushed_weights._same_bits(zero, -zero)
    assert pushed_weights._same_bits(nan, nan.clone())


class Heads(nn.Module):
    def __init__(self, *, tied, head):
        super().__init__()
        self.config = Qwen3MoeConfig(tie_word_embeddings=tied)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(4, 2)
        self.lm_head = self.model.embed_tokens if head is None else nn.Linear(2, 4, bias=False)
        if head is not None:
            self.lm_head.weight.data.copy_(head(self.model.embed_tokens.weight))


@pytest.mark.parametrize(
    ("tied", "head"), [(True, None), (True, torch.clone), (False, torch.zeros_like)]
)
def test_a_tied_output_projection_is_the_embedding_or_has_its_bits(tied, head):
    pushed_weights.require_tied(Heads(tied=tied, head=head))


@pytest.mark.parametrize("head", [torch.zeros_like, lambda weight: weight * 1.0001])
def test_a_tied_output_projection_that_nothing_filled_is_refused(head):
    with pytest.raises(ContractError, match=r"tie_word_embeddings=True: .*its own.*not tied"):
        pushed_weights.require_tied(Heads(tied=True, head=head))


def with_norm(number, like):
    return [(NORM, torch.full_like(like, number))]


@pytest.mark.parametrize("of_shards", [False, True])
def test_what_came_with_an_earlier_push_is_proved_with_every_later_one(
    path, monkeypatch, of_shards
):
    """Also of a rank that holds a shard, of which the digest of what arrived says nothing."""
    engine = Engine(path, WHOLE)
    other = "model.layers.0.input_layernorm.weight"
    held = engine.state_dict()
    if of_shards:
        monkeypatch.setattr(pushed_weights, "rank", lambda: 1)
        engine.load_weights = lambda pushed: [
            held[name].copy_(tensor[len(held[name]) :][: len(held[name])])
            for name, tensor in pushed
        ]
    frozen = torch.arange(2 * len(held[other])).bfloat16()
    frozen = frozen if of_shards else frozen[: len(held[other])]
    norm = torch.ones(len(held[NORM]) * (2 if of_shards else 1), dtype=NARROW)
    pushed_weights.watch_loads(engine, rounds=False)

    def push_norm(number):
        engine.load_weights(with_norm(number, norm))
        return registry.told()["weights"]

    engine.load_weights([(other, frozen)])
    both = push_norm(1.0)
    assert push_norm(2.0) != both and push_norm(1.0) == both
    held[other].view(torch.int16)[3] ^= 1
    assert push_norm(1.0) == f"changed since it was pushed: {other}"
    held[other].view(torch.int16)[3] ^= 1
    assert push_norm(1.0) == both


def test_an_aligned_engine_that_does_not_show_a_weight_is_refused(path):
    for rounds in (False, True):
        engine = Engine(path, WHOLE)
        engine.load_weights = lambda pushed: [*pushed]
        pushed_weights.watch_loads(engine, rounds=rounds)
        with nullcontext() if rounds else pytest.raises(WeightSyncError, match="parameter=fused"):
            engine.load_weights([("fused", torch.ones(3))])


class Renamed(nn.Module):
    """GPT-NeoX under the names that SGLang's transformers backend gives its parts."""

    def __init__(self, path):
        from sglang.srt.models.transformers import TransformersBase

        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(path)
        self.model, self.lm_head = model.gpt_neox, model.lm_head
        self.weight_mapper = TransformersBase.hf_to_sglang_mapper
        self.left_out = ""

    def load_weights(self, pushed):
        held = self.state_dict()
        for name, tensor in self.weight_mapper.apply(pushed):
            if name != self.left_out:
                held[name].copy_(tensor)


def test_weights_that_sglang_holds_under_other_names_are_compared_too(tmp_path):
    """Found by LoRA, where all but the adapters stay as they came: none of GPT-NeoX's was looked at."""
    path = make_checkpoint(tmp_path, "gpt-neox")
    weights = load_file(path / "model.safetensors")
    assert "gpt_neox.final_layer_norm.weight" in weights and "embed_out.weight" in weights
    engine = Renamed(path)
    pushed_weights.watch_loads(engine, rounds=False)
    engine.load_weights(weights.items())
    engine.load_weights([("embed_out.weight", weights["embed_out.weight"])])
    assert "changed" not in registry.told()["weights"]
    engine.model.final_layer_norm.bias.data[0] += 1
    engine.load_weights([("embed_out.weight", weights["embed_out.weight"])])
    assert registry.told()["weights"].endswith(": gpt_neox.final_layer_norm.bias")
    engine.left_out = "lm_head.weight"
    with pytest.raises(WeightSyncError, match=r"embed_out\.weight: .* does not hold the bits"):
        engine.load_weights([("embed_out.weight", weights["embed_out.weight"] + 1)])
