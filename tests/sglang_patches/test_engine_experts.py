"""Experts inside SGLang: where the tensors of a checkpoint go, on one rank and on several.

That a server holds and uses them is tests/e2e/test_verify.py.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

from onpolicy.models.expert_layers import has_usual_experts
from onpolicy.weights.changes import LastPush
from sglang_patches import engine_experts, engine_ranks, pushed_weights, registry
from tests.support.tiny import EXPERT_ARCHITECTURES, make_checkpoint
from tests.support.weight_digests import digest_of


@pytest.fixture(scope="module", params=(*EXPERT_ARCHITECTURES, "deepseek-v2", "gpt-oss"))
def path(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module", params=EXPERT_ARCHITECTURES)
def shared_path(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(autouse=True)
def as_rank(monkeypatch):
    """Rank 0, or the one given: SGLang's own groups exist in a server only."""

    def change(rank):
        monkeypatch.setattr(engine_experts, "rank", lambda: rank)

    change(0)
    return change


def engine(path, ranks):
    """What SGLang's transformers backend holds, before its weights are loaded."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    for module in model.modules():
        if has_usual_experts(module):
            engine_experts._keep_part(module, ranks)
            for parameter in module.parameters():
                nn.init.constant_(parameter, torch.nan)
    return SimpleNamespace(model=model)


def load_all(model, weights):
    held = model.model.state_dict()
    for name, tensor in load(model, weights).items():
        held[name.removeprefix("model.")].copy_(tensor)


def load(model, weights):
    """Returns what is left for SGLang's own loader; experts among it are whole ones, filled too."""
    left = engine_experts._load(lambda _, others: dict(others), model, weights.items())
    for name, tensor in left.items():
        if ".experts." in name:
            model.model.get_parameter(name.removeprefix("model.")).data.copy_(tensor)
    return left


def test_experts_are_filled_and_the_rest_has_the_models_own_names(path):
    whole, model = AutoModel.from_pretrained(path, dtype=torch.float32), engine(path, ranks=1)
    left = load(model, load_file(path / "model.safetensors"))
    loaded = {f"model.{name}": tensor for name, tensor in model.model.state_dict().items()}
    separate = {n for n in loaded if ".experts." in n and n not in left}  # in the checkpoint
    assert left.keys() - {"lm_head.weight"} == loaded.keys() - separate
    assert bool(separate) == (model.model.config.model_type != "gpt_oss")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(left.get(f"model.{name}", loaded[f"model.{name}"]), tensor), name


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_holds_its_part_of_the_intermediate_axis_of_all_experts(
    shared_path, ranks, as_rank
):
    path = shared_path
    whole = AutoModel.from_pretrained(path, dtype=torch.float32).state_dict()
    for rank in range(ranks):
        as_rank(rank)
        model = engine(path, ranks)
        load(model, load_file(path / "model.safetensors"))
        for name, held in model.model.state_dict().items():
            if name.endswith("experts.gate_up_proj"):
                gate, up = (part.chunk(ranks, 1)[rank] for part in whole[name].chunk(2, 1))
                assert torch.equal(held, torch.cat([gate, up], 1))
            elif name.endswith("experts.down_proj"):
                assert torch.equal(held, whole[name].chunk(ranks, 2)[rank])


def test_what_is_held_goes_by_the_names_of_the_checkpoint(path):
    model, on_disk = engine(path, ranks=1), load_file(path / "model.safetensors")
    load(model, on_disk)
    held = engine_experts.held_tensors(model)
    assert held.keys() == on_disk.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, on_disk[name]) for name, tensor in held.items())


def test_of_sglangs_own_models_nothing_is_known():
    assert engine_experts.held_tensors(nn.Linear(1, 1)) == {}


def test_a_tensor_of_another_size_is_refused(shared_path):
    model = engine(shared_path, ranks=1)
    name = next(name for name in engine_experts.held_tensors(model) if ".experts." in name)
    with pytest.raises(RuntimeError):
        load(model, {name: torch.ones(1, 1)})


def test_experts_are_cut_out_once_for_all_buckets_of_all_pushes(path, monkeypatch):
    model, asked = engine(path, 1), []
    cut_out = engine_experts._cut_out
    monkeypatch.setattr(engine_experts, "_cut_out", lambda *args: asked.append(1) or cut_out(*args))
    for _ in range(3):
        load(model, {})
        engine_experts.held_tensors(model)
    assert len(asked) == 1


def test_and_again_where_a_parameter_lies_elsewhere(path):
    """Else weights would arrive where nobody reads them, and be proven there."""
    model = engine(path, 1)
    before = engine_experts.held_tensors(model)
    module = next(module for module in model.model.modules() if has_usual_experts(module))
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.zeros_like(parameter)))
    changed = [
        name
        for name, tensor in engine_experts.held_tensors(model).items()
        if not tensor.isnan().any()
    ]
    assert {name for name, tensor in before.items() if tensor.isnan().all()} & {*changed}


def test_changes_reach_experts_that_lie_in_one_parameter(path, monkeypatch):
    """Elsewhere what was sent had the right checksum, and experts held noise (THUDM/slime#2209)."""
    model, on_disk = engine(path, ranks=1), load_file(path / "model.safetensors")
    on_disk.pop("lm_head.weight", None)
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setattr(engine_ranks, "_group", lambda: group)
    monkeypatch.setattr(pushed_weights, "rank", lambda: 0)
    monkeypatch.setattr(registry, "report", {})
    model.load_weights = lambda weights: load_all(model, dict(weights))
    pushed_weights.watch_loads(model, rounds=False)
    last = LastPush()
    for is_known in (False, True, True):
        last.begin(is_known=is_known)
        model.load_weights(last.changes([*on_disk.items()]))
        assert registry.told()["weights"] == digest_of(on_disk)
        held = engine_experts.held_tensors(model)
        assert all(torch.equal(held[name], tensor) for name, tensor in on_disk.items())
        assert not is_known or last.metrics()["push/sent_share"] < 0.2
        for tensor in on_disk.values():
            tensor.view(torch.int32).view(-1)[::50] ^= 1
    name = next(name for name in on_disk if "experts" in name)
    part = engine_experts.held_tensors(model)[name]
    part[(-1,) * part.dim()] = 7.0
    on_disk[name].view(-1)[1] = 7.0
    last.begin(is_known=True)
    model.load_weights(last.changes([*on_disk.items()]))
    assert registry.told()["weights"] != digest_of(on_disk)
