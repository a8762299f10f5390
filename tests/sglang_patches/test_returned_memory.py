"""What a server on a GPU does when it has taken its memory back."""

import dataclasses
import pkgutil
from types import SimpleNamespace

import pytest

from onpolicy.contract import CONTRACT_VARIABLE
from sglang_patches import plugin, registry, returned_memory
from tests.support.tiny_contract import CONTRACT


@pytest.fixture
def pool():
    """SGLang's own, as it is when a server has started, and then as memory that was given back."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    pool = ReqToTokenPool(size=2, max_context_len=8, device="cpu", enable_memory_saver=False)
    assert not pool.req_to_token.any()
    pool.req_to_token.fill_(1_000_000_000)
    return pool


def resume(pool, tags):
    runner = SimpleNamespace(req_to_token_pool=pool)
    updater = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
    request = SimpleNamespace(tags=tags)
    assert returned_memory._clear_slots("the answer", updater, request) == "the answer"


@pytest.mark.parametrize("tags", [None, [], ["kv_cache"], ["weights", "kv_cache"]])
def test_slots_are_as_sglang_made_them(pool, tags):
    resume(pool, tags)
    assert not pool.req_to_token.any()


def test_slots_that_did_not_come_back_are_left_alone(pool):
    """They are in no memory then."""
    resume(pool, ["weights"])
    assert pool.req_to_token.all()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_server_on_a_gpu_does_so(monkeypatch, device):
    """One with stock operators too."""
    asked = []
    monkeypatch.setattr(registry, "hook", lambda target, *_: asked.append(target))
    monkeypatch.setattr(registry, "started", lambda _: None)
    monkeypatch.setattr(plugin.cpu, "install", lambda: None)
    contract = dataclasses.replace(CONTRACT, backend="stock", device=device)
    monkeypatch.setenv(CONTRACT_VARIABLE, contract.to_json())
    plugin.load()
    assert (returned_memory.TARGET in asked) == (device == "cuda")
    assert callable(pkgutil.resolve_name(returned_memory.TARGET))
