"""SGLang's checks of single architectures, on a CPU with our attention in `torch_native`'s place."""

from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups import model_hook
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.server_args import ServerArgs

from sglang_patches import backend_checks, registry
from sglang_patches.backend_checks import _as_if_accepted
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


@pytest.mark.parametrize(("device", "is_asked_for"), [("cpu", True), ("cuda", False)])
def test_it_is_for_cpus(device, is_asked_for, monkeypatch):
    targets = []
    monkeypatch.setattr(registry, "hook", lambda target, *_: targets.append(target))
    backend_checks.install(SimpleNamespace(device=device))
    assert targets == [backend_checks.TARGET] * is_asked_for
