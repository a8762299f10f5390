"""What the processes of a command get of this host."""

import dataclasses
import os

import pytest
import torch

from onpolicy.config import TrainConfig, groups
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.engine_args import CACHE_MARGIN
from onpolicy.run.contracts import contract_for
from onpolicy.run.placement import (
    CACHE_BYTES,
    cache_tokens,
    require_gpus,
    share_of_cores,
    token_bytes,
)


def test_ranks_and_servers_need_a_gpu_each_and_too_few_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    args = ("--tp-size", "2")
    two = groups.EngineConfig(rollout_num_engines=2)
    require_gpus(TrainConfig(engine=two, sglang_args=args))
    three = groups.EngineConfig(rollout_num_engines=3)
    with pytest.raises(
        ConfigError,
        match=r"--rollout-num-engines=3: 2 trainer ranks \+ 3 servers x --sglang-tp-size 2 = 8 GPUs, "
        r"and this host has 6",
    ):
        require_gpus(TrainConfig(engine=three, sglang_args=args))


def test_servers_that_share_gpus_need_one_each_but_none_of_their_own(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def require(servers, tp_size):
        engine = groups.EngineConfig(colocate=True, rollout_num_engines=servers)
        require_gpus(TrainConfig(engine=engine, sglang_args=("--tp-size", str(tp_size))))

    require(1, 1)
    require(2, 2)
    with pytest.raises(
        ConfigError,
        match=r"--colocate: 2 trainer ranks and 3 servers x --sglang-tp-size 2 = 6 GPUs, .* has 4",
    ):
        require(3, 2)


def test_where_sharing_would_do_it_is_offered(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"= 2 GPUs, and this host has 1\..*\(--colocate\)"):
        require_gpus(TrainConfig())
    with pytest.raises(ConfigError, match=r"or fewer servers\.$"):
        require_gpus(TrainConfig(engine=groups.EngineConfig(rollout_num_engines=2)))


def test_servers_elsewhere_need_no_gpu_of_this_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    require_gpus(TrainConfig(engine=groups.EngineConfig(rollout_server_url=("http://h:1",))))


def test_cores_are_shared_out_and_everyone_gets_one():
    cores = len(os.sched_getaffinity(0))
    assert (share_of_cores(1), share_of_cores(10 * cores)) == (cores, 1)


def test_a_cache_holds_the_longest_sequences_and_at_most_its_memory(checkpoint):
    hf_config = load_config(str(checkpoint))
    config = TrainConfig(model=groups.ModelConfig(dtype="float32"))
    small = contract_for(config, hf_config, aligned=False)
    (kind,) = small.shapes.attention
    wide = dataclasses.replace(kind, kv_heads=1 << 10, head_dim=1 << 10, value_dim=1 << 10)
    shapes = dataclasses.replace(small.shapes, attention=(wide,))
    large = dataclasses.replace(small, shapes=shapes)
    per_token = 2 * hf_config.num_hidden_layers * (1 << 20) * 4
    assert token_bytes(hf_config, large) == per_token
    fitting = CACHE_BYTES // per_token
    assert fitting > 100 + CACHE_MARGIN
    for contract, longest, requests, expected in [
        (small, 100, 7, 8 * (100 + CACHE_MARGIN)),
        (large, 100, 7, fitting),
        (large, 1000, 7, 1000 + CACHE_MARGIN),
    ]:
        assert cache_tokens(hf_config, contract, longest, requests) == expected
