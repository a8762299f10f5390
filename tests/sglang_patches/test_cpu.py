"""SGLang on a CPU: how its processes start, its checks of architectures with our attention, no NCCL."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.arg_groups import model_hook
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.distributed.device_communicators import pynccl_wrapper
from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator
from sglang.srt.distributed.utils import StatelessProcessGroup
from sglang.srt.server_args import ServerArgs

from sglang_patches import platform
from sglang_patches.platform import _as_if_accepted
from tests.support.tiny import make_checkpoint


@pytest.mark.parametrize("architecture", ["gpt-oss", "exaone4", "gemma2", "qwen3"])
def test_a_model_starts_on_our_attention_and_keeps_it(architecture, tmp_path):
    path = make_checkpoint(tmp_path, architecture)
    args = ServerArgs(
        model_path=str(path),
        device="cpu",
        attention_backend="torch_native",
        model_impl="transformers",
    )
    _as_if_accepted(model_hook.handle_model_specific_adjustments, args)
    assert resolved_view(args).attention_backend == "torch_native"
    assert model_hook.resolved_view is resolved_view


def test_a_check_that_fails_leaves_nothing_behind():
    def check(args):
        assert model_hook.resolved_view(args).attention_backend == "triton"
        assert model_hook.resolved_view(args).tp_size == 3
        raise ValueError("another reason")

    with pytest.raises(ValueError, match="another reason"):
        _as_if_accepted(check, SimpleNamespace(attention_backend="torch_native", tp_size=3))
    assert model_hook.resolved_view is resolved_view


@pytest.fixture
def spawns():
    """SGLang's choice, just before ours."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize(("dp_size", "method"), [(1, "fork"), (2, "spawn")])
def test_they_are_forked_unless_threads_start_them(spawns, dp_size, method):
    platform._fork(None, SimpleNamespace(dp_size=dp_size))
    assert multiprocessing.get_start_method() == method


def test_no_nccl_is_opened_beside_a_torch_that_was_built_for_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    opened, asked = [], {}

    def fail(library):
        opened.append(library)
        raise OSError

    monkeypatch.setattr(pynccl_wrapper.ctypes, "CDLL", fail)
    monkeypatch.setattr(
        platform.registry, "hook", lambda target, hook, _: asked.update({target: hook})
    )
    platform.correct_for_cpu()
    two = StatelessProcessGroup(rank=0, world_size=2, store=None)
    PyNcclCommunicator(two, "cpu")
    assert opened == ["libnccl.so.2"]  # SGLang's own way
    monkeypatch.setattr(pynccl_wrapper, "find_nccl_library", asked[platform.NCCL_TARGET])
    assert PyNcclCommunicator(two, "cpu").disabled
    assert opened == ["libnccl.so.2"]
