"""SGLang's own adapters in an engine: what it reports of them, and refuses."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from onpolicy.contract import AdapterShape
from onpolicy.errors import WeightSyncError
from onpolicy.weights.digest import WeightDigest
from sglang_patches import registry, served_adapters
from tests.support.tiny_contract import CONTRACT

SHAPE = AdapterShape(rank=1, scale=1.0, targets=("o_proj",), of_sglang=True)
SERVED = dataclasses.replace(CONTRACT, backend="stock", adapter=SHAPE)
NAME = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
NOTHING = WeightDigest().hexdigest()


@pytest.fixture(autouse=True)
def report(monkeypatch):
    monkeypatch.setattr(registry, "report", {})
    return registry.report


class Manager:
    """SGLang's, of a model with one layer; it keeps what it is given under the names it comes with."""

    def __init__(self, *linears):
        self.lora_modules, self.loras, self.unloaded = [dict.fromkeys(linears)], {}, []

    def load(self, ref, tensors, config):
        self.loras[ref.lora_id] = SimpleNamespace(layers=[SimpleNamespace(weights=tensors)])
        return self.create_lora_update_result(success=bool(config))

    def unload_lora_adapter(self, ref):
        self.unloaded.append(ref.lora_id)

    def create_lora_update_result(self, success, error_message=""):
        return SimpleNamespace(success=success, error_message=error_message)


def load(manager, tensors, config="config"):
    ref = SimpleNamespace(lora_id="1")
    return served_adapters._load(Manager.load, manager, ref, tensors, config)


def test_an_engine_reports_the_adapters_that_it_loaded_last_and_has_memory_of_its_own_for_them(
    report,
):
    served_adapters.watch_loads(SimpleNamespace())
    assert report["weights"] == NOTHING
    manager, pushed = Manager("model.layers.0.self_attn.o_proj"), {NAME: torch.ones(1, 4)}
    assert load(manager, pushed).success
    digest = WeightDigest()
    digest.add(NAME, torch.ones(1, 4))
    assert report["weights"] == digest.hexdigest()
    pushed[NAME].zero_()  # as the next push does
    assert manager.loras["1"].layers[0].weights[NAME].sum() == 4
    served_adapters._unload(manager, SimpleNamespace(lora_id="1"))
    assert report["weights"] == NOTHING


def test_adapters_that_no_linear_would_compute_with_do_not_load(report):
    served_adapters.watch_loads(SimpleNamespace())
    for linears in ((), ("model.layers.0.o_proj",), ("language_model.layers.0.self_attn.o_proj",)):
        manager = Manager(*linears)
        result = load(manager, {NAME: torch.ones(1, 4)})
        assert not result.success and manager.unloaded == ["1"]
        assert f"weights=['{NAME}']: SGLang's model has no linear" in result.error_message
    assert not load(
        Manager("model.layers.0.self_attn.o_proj"), {NAME: torch.ones(1, 4)}, ""
    ).success
    assert report["weights"] == NOTHING


def test_the_model_takes_no_other_weights():
    model = SimpleNamespace(load_weights=list)
    served_adapters.watch_loads(model, rounds=True)
    with pytest.raises(WeightSyncError, match="keeps the base that it loaded"):
        model.load_weights([])


def test_nothing_is_pinned_where_there_is_no_gpu():
    def ask(size):
        made = torch.zeros(size, pin_memory=True), torch.tensor([1.0] * size, pin_memory=True)
        return [tensor.pin_memory() for tensor in made]

    zeros, ones = served_adapters._without_pinning(ask, 3)
    assert zeros.tolist() == [0, 0, 0] and ones.tolist() == [1, 1, 1]
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            ask(3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hooks_come_with_sglangs_own_adapters_alone(monkeypatch, device):
    asked = []
    monkeypatch.setattr(registry, "hook", lambda target, *_: asked.append(target))
    for shape in (None, dataclasses.replace(SHAPE, of_sglang=False)):
        served_adapters.install(dataclasses.replace(SERVED, adapter=shape, device=device))
    assert not asked
    served_adapters.install(dataclasses.replace(SERVED, device=device))
    both = {served_adapters.LOAD_TARGET, served_adapters.UNLOAD_TARGET}
    pins = {served_adapters.INIT_TARGET, served_adapters.BATCH_TARGET} if device == "cpu" else set()
    assert set(asked) == both | pins
