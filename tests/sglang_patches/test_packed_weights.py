"""An engine that keeps its weights packed computes, loads and proves what one that does not would."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModel

from onpolicy.contract import PACKED_VARIABLE
from onpolicy.errors import ContractError, WeightSyncError
from onpolicy.models.align import AlignedLinear, align_modules
from onpolicy.models.experts import AlignedExperts
from onpolicy.models.joint_linears import join_linears
from onpolicy.models.size import ModelSize
from onpolicy.ops.cpu import CpuOperators
from onpolicy.run.launch.memory_model import server_memory
from onpolicy.weights.rounding import rounded
from sglang_patches import experts, packed_weights, registry, weights
from tests.support.sized_runs import make_config, make_spec
from tests.support.tiny import make_checkpoint
from tests.support.tiny_contract import CONTRACT

UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
OUT = "model.layers.1.self_attn.o_proj.weight"
IDS = torch.arange(24).view(2, 12)


class Engine(nn.Module):
    """A model inside SGLang, with its weights as a run's first push brings them."""

    def __init__(self, path, weight_format):
        super().__init__()
        self.model = AutoModel.from_pretrained(path, dtype=torch.bfloat16).eval()
        self.format, self.in_place, self.compares = weight_format, True, False
        operators = CpuOperators(1)
        align_modules(self.model, operators)
        self.joint = join_linears(self.model, operators, lambda x: isinstance(x, AlignedLinear))
        self.load_weights(self.as_pushed(1.0))

    def as_pushed(self, factor):
        """What a run pushes: the weights that this began with, times a factor, rounded."""
        if not hasattr(self, "trained"):
            self.trained = {n: x.clone() for n, x in experts.held_tensors(self).items()}
        (bucket,) = rounded([[(n, x * factor) for n, x in self.trained.items()]], self.format)
        return bucket

    def load_weights(self, pushed):
        held, names = experts.held_tensors(self), set()
        for name, tensor in pushed:
            packed_weights.show(self, name)
            if self.compares:
                assert torch.equal(held[name], tensor), name
            elif self.in_place:
                held[name].copy_(tensor)
            else:
                self.get_parameter(name).data = tensor.clone()
            names.add(name)
        return names

    @torch.no_grad()
    def run(self):
        return self.model(IDS).last_hidden_state


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """SGLang's own groups and linears, and what the plug-in reports, exist in a server only."""
    monkeypatch.setattr(weights, "rank", lambda: 0)
    monkeypatch.setattr(packed_weights, "num_ranks", lambda: 1)
    monkeypatch.setattr(registry, "report", {})
    monkeypatch.setenv(PACKED_VARIABLE, "1")
    own = AlignedLinear | AlignedExperts
    monkeypatch.setattr(packed_weights, "reads_its_own", lambda module: isinstance(module, own))


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe"])
def path(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def contract(weight_format):
    return dataclasses.replace(CONTRACT, dtype="bfloat16", weight_format=weight_format)


def packed(path, weight_format="int4"):
    engine = Engine(path, weight_format)
    weights.watch_loads(engine, rounds=False)
    runner = SimpleNamespace(
        model=engine,
        server_args=SimpleNamespace(enable_weights_cpu_backup=False),
        memory_saver_adapter=SimpleNamespace(region=lambda *_, **__: nullcontext()),
    )
    packed_weights.pack_weights(runner, contract(weight_format), engine.joint)
    return engine


def memory(engine):
    """Bytes of all parameters, those that share some counted once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in engine.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    "weight_format", ["int3_group128", "int8", "fp8_e4m3_block128", "mxfp4", "nvfp4"]
)
def test_a_packed_engine_computes_what_another_does_after_every_push(path, weight_format):
    other, engine = Engine(path, weight_format), packed(path, weight_format)
    assert torch.equal(engine.run(), other.run())
    pushed = engine.as_pushed(0.7)
    assert engine.load_weights(pushed) == {name for name, _ in pushed}
    assert not torch.equal(engine.run(), other.run())
    other.load_weights(pushed)
    assert torch.equal(engine.run(), other.run())


def test_weights_of_linears_and_experts_share_the_memory_of_the_largest(path):
    other, engine = Engine(path, "int4"), packed(path)
    told = registry.told()["packed_weights"]
    held = [x for n, x in experts.held_tensors(other).items() if packed_weights.is_rounded(n, x)]
    assert (told["packed"], told["kept"]) == (len(held), 0)
    assert told["bytes_unpacked"] == sum(x.nbytes for x in held) > 3 * told["bytes"]
    assert memory(other) - memory(engine) > 0.4 * told["bytes_unpacked"]


@pytest.mark.parametrize("weight_format", ["int4_group128", "int8", "fp8_e4m3_block128", "mxfp4"])
@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe"])
def test_sums_of_memory_know_what_it_holds(model, weight_format, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "head_dim": 64}
    path = make_checkpoint(tmp_path, model, moe_intermediate_size=256, **sizes)
    engine = packed(path, weight_format)
    held = memory(engine) + registry.told()["packed_weights"]["bytes"]
    said, all_weights = (summed(path, weight_format, packs) for packs in (True, False))
    no_head = 2 * engine.model.embed_tokens.weight.numel()  # this engine has none
    assert held < said["weights"] - no_head < 1.15 * held < 0.8 * all_weights["weights"]
    assert sum(said.values()) >= sum(all_weights.values())  # until they are packed


def summed(path, weight_format, packs):
    """A server's memory, beside which nothing but its weights takes much."""
    config = make_config(path, "bfloat16")
    engine = dataclasses.replace(
        config.engine, rollout_weight_format=weight_format, rollout_pack_weights=packs
    )
    hf_config, spec = make_spec(dataclasses.replace(config, engine=engine), 50)
    spec = dataclasses.replace(spec, cache_tokens=1, max_concurrency=1)
    return server_memory(spec, ModelSize.of(hf_config), hf_config, 1).parts


def test_a_push_is_proved_and_so_is_what_stays_from_an_earlier_one(path):
    engine = packed(path)
    proof, pushed = registry.report["weights"], engine.as_pushed(0.7)
    engine.load_weights(pushed)
    expected = weights.WeightDigest()
    for pair in pushed:
        expected.add(*pair)
    assert proof() == expected.hexdigest()
    engine.run()
    some = [(name, x) for name, x in engine.as_pushed(0.8) if ".layers.0." in name]
    for pair in some:
        expected.add(*pair)
    engine.load_weights(some)
    assert proof() == expected.hexdigest()
    engine.load_weights(some)
    kept = engine.packed_weights._place_of[OUT].packed
    kept[OUT].codes[0, 0] ^= 1
    assert proof() == f"changed since it was pushed: {OUT}"


def test_what_a_cuda_graph_may_have_left_is_not_computed_with(dense):
    engine = packed(dense)
    before, own = engine.run(), engine.packed_weights
    own._unpacked = own._place_of["model.layers.0.self_attn.q_proj.weight"]
    own._memory.zero_()
    assert torch.equal(engine.run(), before)


def test_a_loader_that_compares_finds_what_was_packed(path):
    """As one does whose base several names share."""
    engine = packed(path)
    before = engine.run()
    engine.compares = True
    engine.load_weights(engine.as_pushed(1.0))
    with pytest.raises(AssertionError):
        engine.load_weights(engine.as_pushed(0.7))
    assert torch.equal(engine.run(), before)
    packed_weights.show(engine, OUT)
    held = experts.held_tensors(engine)[OUT]
    assert torch.equal(held, dict(engine.as_pushed(1.0))[OUT])


def test_weights_that_are_not_rounded_so_are_refused_by_name(dense):
    engine = packed(dense)
    with pytest.raises(WeightSyncError, match=f"parameter={UP}: the weight is not one .* int4"):
        engine.load_weights([(UP, engine.trained[UP] * 0.7)])


def test_a_loader_with_memory_of_its_own_is_refused(dense):
    engine = packed(dense)
    engine.in_place = False
    with pytest.raises(WeightSyncError, match=f"parameter={DOWN}: SGLang's loader put it"):
        engine.load_weights([pair for pair in engine.as_pushed(0.7) if pair[0] == DOWN])


def test_a_weight_that_no_place_has_is_refused(dense):
    engine = packed(dense)
    with pytest.raises(WeightSyncError, match=r"parameter=other\.weight: the engine does not know"):
        engine.load_weights([("other.weight", torch.ones(2, 2))])


@pytest.mark.parametrize(("weight_format", "kept"), [("mxfp4", [DOWN]), ("int4", [])])
def test_ranks_keep_what_is_not_in_whole_blocks(dense, monkeypatch, weight_format, kept):
    monkeypatch.setattr(packed_weights, "num_ranks", lambda: 2)
    other, engine = Engine(dense, weight_format), packed(dense, weight_format)
    assert registry.told()["packed_weights"]["kept"] == 2 * len(kept)
    assert set(kept) <= engine.packed_weights._kept
    for each in (other, engine):
        each.load_weights(engine.as_pushed(0.7))
    assert torch.equal(engine.run(), other.run())


def test_ranks_that_could_pack_nothing_are_refused(dense, monkeypatch):
    monkeypatch.setattr(packed_weights, "num_ranks", lambda: 2)
    with pytest.raises(ContractError, match="no linear of Qwen3Model is in whole blocks"):
        packed(dense, "fp8_e4m3_block128")


def test_an_engine_is_packed_only_if_it_is_asked_for_and_rounds(dense, monkeypatch):
    assert not hasattr(packed(dense, ""), packed_weights.ATTRIBUTE)
    monkeypatch.delenv(PACKED_VARIABLE)
    assert not hasattr(packed(dense), packed_weights.ATTRIBUTE)


def test_what_an_engine_starts_with_is_rounded_as_runs_push_it_and_pushes_are_left_alone(dense):
    given = {
        UP: torch.randn(80, 48),
        "model.embed_tokens.weight": torch.randn(80, 48),
        "model.layers.0.up_proj.lora.A": torch.randn(2, 48),
    }
    load = packed_weights.rounding(contract("int4"))
    loaded = load(lambda _, weights: dict(weights), None, given.items())
    (pushed,) = map(dict, rounded([[(n, x.bfloat16()) for n, x in given.items()]], "int4"))
    changed = {n for n, x in given.items() if not torch.equal(loaded[n].bfloat16(), x.bfloat16())}
    assert changed == {UP} and torch.equal(loaded[UP], pushed[UP])
    assert load(lambda _, weights: dict(weights), packed(dense), given.items())[UP] is given[UP]
