"""SGLang on a CPU: how its processes start, and its checks of architectures with our attention."""

import multiprocessing
from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups import model_hook
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.server_args import ServerArgs

from sglang_patches import cpu
from sglang_patches.cpu import _as_if_accepted
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
    cpu._fork(None, SimpleNamespace(dp_size=dp_size))
    assert multiprocessing.get_start_method() == method
