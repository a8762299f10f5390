"""On Hopper SGLang's own attention backend stays, if it is set as the contract needs it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from onpolicy.errors import ContractError
from sglang_patches import paged_attention
from tests.support.flash_attention_backend import attributes_of_backend

LOADER = "sglang.kernels.ops.attention.flash_attention_v3"


def test_the_installed_sglang_sets_what_is_asked_for():
    assert paged_attention.WANTED.keys() <= attributes_of_backend()


def kernels_of(module, monkeypatch):
    def flash_attn_with_kvcache():
        pass

    flash_attn_with_kvcache.__module__ = module
    loader = ModuleType(LOADER)
    loader._load_fa3_kernels = lambda: {"flash_attn_with_kvcache": flash_attn_with_kvcache}
    monkeypatch.setitem(sys.modules, LOADER, loader)


def backend(**changes):
    """The attributes that FlashAttentionBackend has in all supported versions, as it should be set."""
    return SimpleNamespace(**{**paged_attention.WANTED, **changes})


def test_a_deterministic_backend_with_the_trainers_kernels_passes(monkeypatch):
    kernels_of("sgl_kernel.flash_attn", monkeypatch)
    paged_attention._require_exact(None, backend())
    paged_attention._require_exact(None, backend(decode_num_splits=1))


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
        paged_attention._require_exact(None, backend(**{name: value}))


def test_another_build_of_the_kernels_is_refused(monkeypatch):
    kernels_of("sgl_flash_attn3.flash_attn_interface", monkeypatch)
    with pytest.raises(ContractError, match=r"kernels='sgl_flash_attn3.*must be 'sgl_kernel"):
        paged_attention._require_exact(None, backend())
