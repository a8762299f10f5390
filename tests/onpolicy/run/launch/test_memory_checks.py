"""What does not fit the memory that is free, or an engine's cache, is refused with the sum."""

import dataclasses

import pytest

from onpolicy.config import groups
from onpolicy.errors import ConfigError
from onpolicy.models.size import ModelSize
from onpolicy.run.launch import memory_checks
from onpolicy.run.launch.memory_checks import require_cache, require_memory, require_run_fits
from onpolicy.run.launch.process_memory import ProcessMemory
from onpolicy.system.gpus import Gpu
from tests.support.sized_runs import make_config, make_spec


def test_what_cannot_fit_is_refused_with_the_sum(monkeypatch):
    monkeypatch.setattr(memory_checks, "free_memory", lambda: 3 << 30)
    rank = ProcessMemory("trainer rank", {"weights": 1 << 30, "AdamW": 1 << 29}, count=2)
    server = ProcessMemory("SGLang server", {"cache of 9 tokens": 1 << 28})
    require_memory([rank], "cpu")
    with pytest.raises(
        ConfigError,
        match=r"memory=3\.25 GiB together: this host has 3\.00 GiB free\. 2 x trainer rank: weights "
        r"1\.00 \+ AdamW 0\.50 = 3\.00 GiB; SGLang server: cache of 9 tokens 0\.25 = 0\.25 GiB\. ",
    ):
        require_memory([rank, server], "cpu")


def test_on_gpus_each_process_has_its_own(monkeypatch):
    there = tuple(Gpu("H100", (9, 0), free << 30, 80 << 30) for free in (2, 1))
    monkeypatch.setattr(memory_checks, "gpus", lambda: there)
    require_memory([ProcessMemory("trainer rank", {"weights": 1 << 30}, count=8)], "cuda")
    with pytest.raises(
        ConfigError, match=r"1\.50 GiB the largest of them: the fullest GPU has 1\.00"
    ):
        require_memory([ProcessMemory("trainer rank", {"weights": 3 << 29})], "cuda")


def test_gpus_of_a_cluster_are_not_compared_with_those_of_this_host(monkeypatch):
    monkeypatch.setattr(memory_checks, "gpus", lambda: pytest.fail("this host was asked"))
    needed = [ProcessMemory("trainer rank", {"weights": 1 << 50})]
    require_memory(needed, "cuda", ray_address="h:1")


def test_a_sequence_that_fits_no_cache_is_refused_and_waiting_is_said(checkpoint, caplog):
    config = make_config(checkpoint)
    small = dataclasses.replace(config, sglang_args=("--max-total-tokens", "57"))
    with pytest.raises(
        ConfigError, match=r"--sglang-max-total-tokens=57: .*have 50 tokens.* need 58"
    ):
        require_cache(make_spec(small)[1])
    caplog.set_level("INFO")
    two = dataclasses.replace(config, sglang_args=("--max-total-tokens=120",))
    require_cache(make_spec(two)[1])
    assert "120 tokens holds 2 sequences of 50 tokens" in caplog.text
    assert "of 256 requests in flight the others wait" in caplog.text


def test_servers_elsewhere_are_not_counted(checkpoint, monkeypatch):
    monkeypatch.setattr(memory_checks, "free_memory", lambda: 1 << 30)
    for urls, fits in ((("http://h:1",), True), ((), False)):
        config = make_config(checkpoint, rollout_server_url=urls)
        hf_config, spec = make_spec(config)
        if fits:
            require_run_fits(config, hf_config, spec, ModelSize.of(hf_config))
            continue
        with pytest.raises(ConfigError, match=r"memory=.* SGLang server: weights"):
            require_run_fits(config, hf_config, spec, ModelSize.of(hf_config))


def test_hosts_of_a_cluster_are_not_counted_against_this_one(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(memory_checks, "free_memory", lambda: 1 << 30)
    caplog.set_level("INFO")
    config = dataclasses.replace(
        make_config(checkpoint, rollout_num_engines=2),
        cluster=groups.ClusterConfig(ray_address="h:1", actor_num_nodes=2),
    )
    hf_config, spec = make_spec(config)
    require_run_fits(config, hf_config, spec, ModelSize.of(hf_config))
    assert "memory of 2 x trainer rank: " in caplog.text
    assert "memory of 2 x SGLang server: " in caplog.text and "this host" not in caplog.text
    small = dataclasses.replace(config, sglang_args=("--max-total-tokens", "57"))
    with pytest.raises(ConfigError, match="--sglang-max-total-tokens=57: "):
        require_run_fits(small, hf_config, make_spec(small)[1], ModelSize.of(hf_config))


def test_a_dry_run_says_what_cannot_fit_and_goes_on(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(memory_checks, "free_memory", lambda: 1 << 30)
    config = dataclasses.replace(make_config(checkpoint), dry_run=True)
    hf_config, spec = make_spec(config)
    require_run_fits(config, hf_config, spec, ModelSize.of(hf_config))
    assert "here and now the run would be refused: memory=" in caplog.text
