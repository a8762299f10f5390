"""Only the version of Megatron-core whose internals are replaced is accepted."""

import dataclasses
import importlib.metadata

import pytest

from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch.contracts import contract_for
from onpolicy.train.megatron import make
from onpolicy.train.megatron.make import MEGATRON_CORE, require_megatron
from tests.support.bytes_on_cpu import SIZES
from tests.support.megatron_training import Job
from tests.support.tiny import make_checkpoint


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


@pytest.mark.parametrize(("head_dim", "is_whole"), [(128, True), (64, False)])
def test_heads_that_are_no_whole_blocks_of_bytes_are_refused(tmp_path, head_dim, is_whole):
    """With 4 of 64 numbers each linear has whole ones, and q, k and v joined head by head have not."""
    sizes = {"head_dim": head_dim, "num_attention_heads": 4, "num_key_value_heads": 4}
    path = make_checkpoint(tmp_path, "qwen3", **{**SIZES, **sizes})
    config, hf_config = Job(path=path).config(), load_config(str(path))
    contract = contract_for(config, hf_config, aligned=True)
    operators = dataclasses.replace(config.operators, operators="hopper_fp8")
    config = dataclasses.replace(config, operators=operators)
    if is_whole:
        make.check(config, hf_config, contract)
        return
    with pytest.raises(ConfigError, match=r"hopper_fp8: head_dim=64, .*of the 128 rows.*fsdp"):
        make.check(config, hf_config, contract)
