"""Which SGLang versions are served, and what is said of others."""

from importlib.metadata import PackageNotFoundError

import pytest

from onpolicy.errors import ContractError
from sglang_patches import status


@pytest.fixture
def installed(monkeypatch):
    return lambda found: monkeypatch.setattr(status, "version", lambda name: found)


@pytest.mark.parametrize("found", [*status.SUPPORTED, "0.5.23.post1", "0.5.21+cu130"])
def test_supported_versions_are_accepted(installed, found):
    installed(found)
    assert status.sglang_version() == found


@pytest.mark.parametrize(
    "found", ["0.5.17", "0.5.18", "0.5.20", "0.5.24", "0.6.0", "0.5.2", "main"]
)
def test_another_version_is_refused_by_name_with_a_remedy(installed, found):
    installed(found)
    with pytest.raises(ContractError, match=rf"sglang=={found}: .*0.5.21, 0.5.22, .*pip install"):
        status.sglang_version()


def test_a_missing_sglang_is_refused_with_a_remedy(monkeypatch):
    def not_found(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(status, "version", not_found)
    with pytest.raises(ContractError, match=r"sglang is not installed: .*make setup"):
        status.sglang_version()
