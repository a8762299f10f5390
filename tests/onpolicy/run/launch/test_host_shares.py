"""What the processes of a command get of its host."""

import dataclasses
import os

import pytest
import torch

from onpolicy.cluster.placement import (
    Host,
    placement_here,
    placement_of,
    placement_of_servers,
    share_of_cores,
)
from onpolicy.config import TrainConfig, groups
from onpolicy.errors import ConfigError, ContractError
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch.contracts import contract_for


def on(device, checkpoint, **groups_of_config):
    config = TrainConfig(model=groups.ModelConfig(dtype="float32"), **groups_of_config)
    contract = contract_for(config, load_config(str(checkpoint)), aligned=False)
    return config, dataclasses.replace(contract, device=device)


def test_without_a_cluster_all_is_on_this_host(monkeypatch, checkpoint):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    engine = groups.EngineConfig(rollout_num_engines=2)
    placement = placement_here(*on("cuda", checkpoint, engine=engine))
    assert [slot.devices for slot in (*placement.trainer, *placement.engines)] == [(0,), (1,), (2,)]
    assert placement.is_here
    three = groups.EngineConfig(rollout_num_engines=3)
    with pytest.raises(ConfigError, match=r"--rollout-num-engines=3: .* = 4 GPUs"):
        placement_here(*on("cuda", checkpoint, engine=three))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": groups.EngineConfig(rollout_host="10.0.0.1")}, "--rollout-host=10.0.0.1: "),
        ({"sync": groups.WeightSyncConfig(weight_sync="ipc")}, "--weight-sync=ipc: .*engine 0 is on b"),
    ],
)  # fmt: skip
def test_what_cannot_be_on_several_hosts_is_refused(checkpoint, changes, message):
    hosts = [
        Host("1", "a", "10.0.0.1", 4, 0),
        Host("2", "b", "10.0.0.2", 4, 0, is_here=False),
    ]
    placement_of(*on("cpu", checkpoint), hosts)
    with pytest.raises(ConfigError, match=message):
        placement_of(*on("cpu", checkpoint, **changes), hosts)


def test_cuda_ipc_is_for_engines_beside_a_rank_that_has_their_weights(checkpoint):
    """Every rank has them in a push, and rank 0 alone what a run that may lag keeps."""
    here, there = (Host(n, n, f"10.0.0.{n}", 4, 0, is_here=n == "1") for n in "12")
    two = {
        "sync": groups.WeightSyncConfig(weight_sync="ipc"),
        "engine": groups.EngineConfig(rollout_num_engines=2),
    }
    ranks = groups.ClusterConfig(actor_num_nodes=2, actor_num_ranks_per_node=1)
    placement = placement_of(*on("cpu", checkpoint, cluster=ranks, **two), [here, there])
    assert {slot.host for slot in placement.engines} == {here, there}
    one = groups.ClusterConfig(actor_num_ranks_per_node=1)
    with pytest.raises(ConfigError, match=r"engine \d is on 2 .*without a rank beside it"):
        placement_of(*on("cpu", checkpoint, cluster=one, **two), [here, there])
    lags = groups.RolloutConfig(rollout_lag=1)
    with pytest.raises(ConfigError, match=r"engine \d is on 2 .*without rank 0 .* beside it"):
        placement_of(*on("cpu", checkpoint, cluster=ranks, rollout=lags, **two), [here, there])


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": groups.EngineConfig(rollout_num_engines=2)},
        {"cluster": groups.ClusterConfig(actor_num_gpus_per_node=1)},
    ],
    ids=["placed there", "GPUs for ranks"],
)
def test_a_contract_for_cpus_takes_no_other_host_with_gpus(checkpoint, changes):
    here, there = (
        Host("1", "a", "10.0.0.1", 4, 8),  # PyTorch may be one for CPUs
        Host("2", "b", "10.0.0.2", 4, 2, is_here=False),
    )
    told = r"b \(10\.0\.0\.2\): .* num_gpus=2, and this host, .* `ray start --num-gpus 0`"
    with pytest.raises(ContractError, match=told):
        placement_of(*on("cpu", checkpoint, **changes), [here, there])


def test_servers_alone_take_no_other_host_with_gpus_under_a_contract_for_cpus(checkpoint):
    _, contract = on("cpu", checkpoint)
    two = groups.EngineCountConfig(rollout_num_engines=2)
    here, there = (
        Host("1", "a", "10.0.0.1", 4, 0),
        Host("2", "b", "10.0.0.2", 4, 2, is_here=False),
    )
    with pytest.raises(ContractError, match=r"b \(10\.0\.0\.2\): .* num_gpus=2, and this host"):
        placement_of_servers(two, 1, "127.0.0.1", contract, [here, there])


def test_servers_alone_are_spread_over_hosts_and_refused_as_those_of_a_run(checkpoint):
    hosts = [
        Host("1", "a", "10.0.0.1", 4, 0),
        Host("2", "b", "10.0.0.2", 4, 0, is_here=False),
    ]
    _, contract = on("cpu", checkpoint)
    two = groups.EngineCountConfig(rollout_num_engines=2)
    placement = placement_of_servers(two, 1, "127.0.0.1", contract, hosts)
    assert [slot.host for slot in placement.engines] == hosts and placement.trainer == ()
    assert placement_of_servers(two, 1, "10.0.0.1", contract, hosts[:1]).is_here
    with pytest.raises(ConfigError, match=r"--rollout-host=10\.0\.0\.1: other hosts"):
        placement_of_servers(two, 1, "10.0.0.1", contract, hosts)


def test_cores_are_shared_out_and_everyone_gets_one():
    cores = len(os.sched_getaffinity(0))
    assert (share_of_cores(1), share_of_cores(10 * cores)) == (cores, 1)
