"""Which SGLang versions are served, and what is said of others."""

import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from onpolicy.errors import ContractError
from sglang_patches import versions


@pytest.fixture
def installed(monkeypatch):
    return lambda found: monkeypatch.setattr(versions, "version", lambda name: found)


@pytest.mark.parametrize("found", [*versions.SUPPORTED, "0.5.23.post1", "0.5.17+cu130"])
def test_supported_versions_are_accepted(installed, found):
    installed(found)
    assert versions.sglang_version() == found


@pytest.mark.parametrize(
    "found", ["0.5.16", "0.5.18", "0.5.20", "0.5.24", "0.6.0", "0.5.2", "main"]
)
def test_another_version_is_refused_by_name_with_a_remedy(installed, found):
    installed(found)
    with pytest.raises(ContractError, match=rf"sglang=={found}: .*0.5.17, 0.5.21, .*pip install"):
        versions.sglang_version()


def test_a_missing_sglang_is_refused_with_a_remedy(monkeypatch):
    def not_found(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", not_found)
    with pytest.raises(ContractError, match=r"sglang is not installed: .*make setup"):
        versions.sglang_version()


@pytest.mark.parametrize(
    "has",
    [versions.has_weight_update_sessions, versions.has_model_hook, versions.wants_model_names],
)
def test_what_came_after_0_5_17(installed, has):
    seen = []
    for found in ("0.5.17", "0.5.17+cu130", "0.5.21", "0.5.22", "0.5.23.post1"):
        installed(found)
        seen.append(has())
    assert seen == [False, False, True, True, True]


@pytest.mark.parametrize(("chunk", "longest"), [(8192, 8192), (-1, 16384), (None, 16384)])
@pytest.mark.parametrize("resolves_in_place", [True, False])
def test_the_longest_prefill_is_what_sglang_resolved(
    monkeypatch, chunk, longest, resolves_in_place
):
    resolved = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=16384)
    asked = SimpleNamespace(chunked_prefill_size=7, max_prefill_tokens=8)
    name = "sglang.srt.runtime_context"
    context = SimpleNamespace(get_schedule=lambda: resolved)
    monkeypatch.setitem(sys.modules, name, None if resolves_in_place else context)
    assert versions.longest_prefill(resolved if resolves_in_place else asked) == longest
