"""Only the version of Megatron-core whose internals are replaced is accepted."""

import importlib.metadata

import pytest

from onpolicy.errors import ConfigError
from onpolicy.train.megatron import make
from onpolicy.train.megatron.make import MEGATRON_CORE, require_megatron


def test_the_pinned_version_is_installed_and_accepted():
    require_megatron()


def test_another_version_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(make, "version", lambda name: "0.17.0")
    with pytest.raises(
        ConfigError, match=rf"megatron-core==0\.17\.0.*pip install.*{MEGATRON_CORE}"
    ):
        require_megatron()


def test_a_missing_package_is_said_with_the_remedy(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(make, "version", missing)
    with pytest.raises(ConfigError, match=r"not installed.*pip install.*--train-backend fsdp"):
        require_megatron()
