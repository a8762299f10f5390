"""On Hopper SGLang's own attention backend stays, if it is set as the contract needs it."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from onpolicy.errors import ContractError
from sglang_patches import flash_attention

LOADER = "sglang.kernels.ops.attention.flash_attention_v3"


SOURCE = "srt/layers/attention/flashattention_backend.py"


def test_the_installed_sglang_sets_what_is_asked_for():
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    tree = ast.parse((root / SOURCE).read_text())
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    backend = next(node for node in classes if node.name == "FlashAttentionBackend")
    constructor = next(node for node in backend.body if getattr(node, "name", "") == "__init__")
    is_set = {node.attr for node in ast.walk(constructor) if isinstance(node, ast.Attribute)}
    assert flash_attention.WANTED.keys() <= is_set


def kernels_of(module, monkeypatch):
    def flash_attn_with_kvcache():
        pass

    flash_attn_with_kvcache.__module__ = module
    loader = ModuleType(LOADER)
    loader._load_fa3_kernels = lambda: {"flash_attn_with_kvcache": flash_attn_with_kvcache}
    monkeypatch.setitem(sys.modules, LOADER, loader)


def backend(**changes):
    """The attributes that FlashAttentionBackend has in all supported versions, as it should be set."""
    return SimpleNamespace(**{**flash_attention.WANTED, **changes})


def test_a_deterministic_backend_with_the_trainers_kernels_passes(monkeypatch):
    kernels_of("sgl_kernel.flash_attn", monkeypatch)
    flash_attention._require_exact(None, backend())
    flash_attention._require_exact(None, backend(decode_num_splits=1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_splits", 0),
        ("decode_num_splits", 0),
        ("fa_impl_ver", 4),
        ("page_size", 128),
        ("use_mla", True),
    ],
)
def test_a_setting_under_which_attention_depends_on_the_batch_is_refused(monkeypatch, name, value):
    kernels_of("sgl_kernel.flash_attn", monkeypatch)
    with pytest.raises(ContractError, match=rf"{name}={value}: must be .*the trainer's"):
        flash_attention._require_exact(None, backend(**{name: value}))


def test_another_build_of_the_kernels_is_refused(monkeypatch):
    kernels_of("sgl_flash_attn3.flash_attn_interface", monkeypatch)
    with pytest.raises(ContractError, match=r"kernels='sgl_flash_attn3.*must be 'sgl_kernel"):
        flash_attention._require_exact(None, backend())
