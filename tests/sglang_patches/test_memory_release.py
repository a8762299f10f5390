"""What a server on a GPU does before it gives memory back."""

import dataclasses
import inspect
import pkgutil

import pytest
import torch

from onpolicy.contract import CONTRACT_VARIABLE
from sglang_patches import platform, plugin, registry
from tests.support.tiny_contract import CONTRACT


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_server_on_a_gpu_waits_for_it_first(monkeypatch, device):
    """One with stock operators too."""
    asked, waited = {}, []
    monkeypatch.setattr(registry, "hook", lambda target, *hook: asked.update({target: hook}))
    monkeypatch.setattr(registry, "started", lambda _: None)
    monkeypatch.setattr(plugin.platform, "correct_for_cpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    contract = dataclasses.replace(CONTRACT, backend="stock", device=device)
    monkeypatch.setenv(CONTRACT_VARIABLE, contract.to_json())
    plugin.load()
    assert (platform.TARGET in asked) == (device == "cuda")
    if device == "cuda":
        wait, kind = asked[platform.TARGET]
        assert kind == "before" and wait("the adapter", "weights") is None and waited


def test_whatever_sglang_gives_back_it_gives_back_there():
    """By the adapter's `pause`, between which it computes."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    assert callable(pkgutil.resolve_name(platform.TARGET))
    source = inspect.getsource(SchedulerWeightUpdaterManager.release_memory_occupation)
    assert source.count("self.memory_saver_adapter.pause(") == 3
