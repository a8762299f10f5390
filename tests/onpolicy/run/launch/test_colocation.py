"""A server and a rank of the trainer on one GPU. No GPU has held both yet."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch

from onpolicy.config import TrainConfig, groups
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.rollout.engine_args import COLOCATED_FRACTION, engine_flags
from onpolicy.run.launch.colocation import SCORER_BYTES, require_room, require_size
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import places_in, rollout_spec
from onpolicy.run.launch.host_shares import placement_here

H100 = {"itemsize": 2, "ranks": 1, "gpus_per_server": 1, "fraction": 0.4, "gpu_bytes": 80 * 10**9}


@pytest.mark.parametrize(
    ("parameters", "changes", "message"),
    [
        (2_000_000_000, {}, None),
        (4_000_000_000, {}, r"4,000,000,000 x 16 bytes / 1 ranks\) take 64.0 GB .* 80.0 GB is 48.0"),
        (4_000_000_000, {"fraction": 0.19}, None),
        (4_000_000_000, {"ranks": 2}, None),
        (4_000_000_000, {"gpu_bytes": 141 * 10**9}, None),
        (
            30_000_000_000, {"ranks": 16},
            r"--sglang-mem-fraction-static=0.4: the server's weights \(30,000,000,000 x 2 bytes / 1 "
            r"GPUs\) take 60.0 GB of every GPU, .* is 32.0\. Raise it, or --sglang-tp-size",
        ),
        (30_000_000_000, {"ranks": 16, "gpus_per_server": 2}, None),
        (4_000_000_000, {"trainer_bytes": SCORER_BYTES}, None),
        (
            13_000_000_000, {"trainer_bytes": SCORER_BYTES},
            r"the trainer's weights \(13,000,000,000 x 4 bytes / 1 ranks\) take 52.0 GB",
        ),
    ],
)  # fmt: skip
def test_what_surely_does_not_fit_is_refused_with_the_sum(parameters, changes, message):
    if message is None:
        require_room(parameters=parameters, **{**H100, **changes})
        return
    with pytest.raises(ConfigError, match=message):
        require_room(parameters=parameters, **{**H100, **changes})


def test_a_trainer_that_cannot_take_a_step_is_told_of_the_way_without_one():
    with pytest.raises(ConfigError, match=r"onpolicy verify.*no step \(--no-step\)"):
        require_room(parameters=4_000_000_000, **H100)


@pytest.mark.parametrize("takes_steps", [True, False])
def test_a_gpu_without_room_for_a_step_may_have_room_to_score(takes_steps, one_gpu, checkpoint):
    size = ModelSize.of(load_config(str(checkpoint))).parameters
    one_gpu.total_memory = 16 * size  # of which the trainer's part is 9.6
    rollout = groups.RolloutConfig(num_rollout=int(takes_steps))
    refused = pytest.raises(ConfigError, match="--no-step") if takes_steps else nullcontext()
    with refused:
        spec_on("cuda", checkpoint, rollout=rollout, colocate=True)


def spec_on(device, checkpoint, sglang_args=(), ray_address="", rollout=None, **engine):
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=str(checkpoint)),
        rollout=rollout or groups.RolloutConfig(),
        engine=groups.EngineConfig(**engine),
        cluster=groups.ClusterConfig(ray_address=ray_address),
        sglang_args=tuple(sglang_args),
    )
    hf_config = load_config(str(checkpoint))
    contract = contract_for(config, hf_config, aligned=False)
    contract = dataclasses.replace(contract, device=device)
    spec = rollout_spec(config, hf_config, contract)
    placement = placement_here(config, contract)
    return places_in(placement, config).specs(spec)[0]


def test_on_a_cpu_it_is_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"--colocate: this machine has no GPU .* Leave it out"):
        spec_on("cpu", checkpoint, colocate=True)


@pytest.fixture
def one_gpu(monkeypatch):
    class Properties:
        total_memory = 141 * 10**9

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    return Properties


def test_a_server_begins_at_the_trainers_first_gpu_and_takes_its_part(one_gpu, checkpoint):
    flags = engine_flags(spec_on("cuda", checkpoint, colocate=True), 1)
    assert flags[flags.index("--base-gpu-id") + 1] == "0"
    assert flags[flags.index("--mem-fraction-static") + 1] == str(COLOCATED_FRACTION)
    assert "--enable-memory-saver" in flags


def test_the_users_fraction_comes_last_and_is_the_one_that_is_judged(one_gpu, checkpoint):
    asked = ("--mem-fraction-static", "0.3")
    flags = engine_flags(spec_on("cuda", checkpoint, asked, colocate=True), 1)
    assert tuple(flags[-2:]) == asked
    one_gpu.total_memory = 1 << 20
    with pytest.raises(ConfigError, match=r"--sglang-mem-fraction-static=0\.3: "):
        spec_on("cuda", checkpoint, asked, colocate=True)


def test_on_a_cluster_this_hosts_gpu_says_nothing_of_those_that_are_shared(one_gpu, checkpoint):
    one_gpu.total_memory = 1 << 20
    spec_on("cuda", checkpoint, colocate=True, ray_address="h:1")
    with pytest.raises(ConfigError, match=r"of every GPU, and their part of 0\.0 GB"):
        spec_on("cuda", checkpoint, colocate=True)


def test_the_size_is_that_of_the_gpu_that_is_asked(checkpoint):
    config = TrainConfig(model=groups.ModelConfig(hf_checkpoint=str(checkpoint)))
    contract = contract_for(config, load_config(str(checkpoint)), aligned=False)
    judge = require_size(config, contract)
    judge("GPU 1 of b", 80 * 10**9)
    with pytest.raises(ConfigError, match=r"of GPU 1 of b, and their part of 0\.0 GB"):
        judge("GPU 1 of b", 1 << 20)


def test_a_server_of_its_own_gpus_keeps_sglangs_default(monkeypatch, one_gpu, checkpoint):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    flags = engine_flags(spec_on("cuda", checkpoint), 1)
    assert flags[flags.index("--base-gpu-id") + 1] == "1"
    assert "--mem-fraction-static" not in flags
