"""What a server is started with, and what is refused before it is."""

import dataclasses
from importlib.util import find_spec

import pytest
import torch

from onpolicy.cluster.placement import placement_here
from onpolicy.config import TrainConfig, groups
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import state_bytes, token_bytes
from onpolicy.ops.recurrence import state_rows
from onpolicy.rollout.engine_args import CACHE_MARGIN, engine_flags
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import (
    CACHE_BYTES,
    STATES,
    cache_tokens,
    places_in,
    rollout_spec,
    state_slots,
)
from tests.support.tiny import make_checkpoint


@pytest.mark.skipif(find_spec("sgl_kernel") is not None, reason="sgl_kernel is installed")
def test_a_server_whose_sglang_lacks_a_package_is_refused_unless_it_runs_elsewhere(checkpoint):
    config = TrainConfig(model=groups.ModelConfig(hf_checkpoint=str(checkpoint)))
    hf_config = load_config(str(checkpoint))
    contract = contract_for(config, hf_config, aligned=True)
    contract = dataclasses.replace(contract, backend="triton", device="cuda")
    with pytest.raises(ConfigError, match="operators=triton: sgl_kernel is missing"):
        rollout_spec(config, hf_config, contract)
    engine = groups.EngineConfig(rollout_server_url=("http://127.0.0.1:30000",))
    rollout_spec(dataclasses.replace(config, engine=engine), hf_config, contract)


def spec_on(device, checkpoint, sglang_args=(), **engine):
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=str(checkpoint)),
        engine=groups.EngineConfig(**engine),
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
    # 0.5 GiB and what prefill (12 GiB), graphs (0.5) and 0.9 of libraries take, of 131.3 GiB.
    assert flags[flags.index("--mem-fraction-static") + 1] == "0.89"
    assert "--enable-memory-saver" in flags


def test_the_part_leaves_what_is_beside_it_in_gpus_of_every_size(one_gpu, checkpoint):
    for size, chunk, part in [(80, 8192, "0.82"), (24, 8192, "0.42"), (24, 2048, "0.79")]:
        one_gpu.total_memory = size << 30
        spec = spec_on("cuda", checkpoint, (f"--chunked-prefill-size={chunk}",), colocate=True)
        flags = engine_flags(spec, 1)
        assert flags[flags.index("--mem-fraction-static") + 1] == part


def test_the_users_fraction_comes_last(one_gpu, checkpoint):
    asked = ("--mem-fraction-static", "0.3")
    flags = engine_flags(spec_on("cuda", checkpoint, asked, colocate=True), 1)
    assert tuple(flags[-2:]) == asked


def test_a_server_of_its_own_gpus_keeps_sglangs_default(monkeypatch, one_gpu, checkpoint):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    flags = engine_flags(spec_on("cuda", checkpoint), 1)
    assert flags[flags.index("--base-gpu-id") + 1] == "1"
    assert "--mem-fraction-static" not in flags


def test_states_are_those_of_the_requests_at_once_and_at_most_their_memory(tmp_path):
    hf_config = load_config(str(make_checkpoint(tmp_path, "qwen3.5")))
    config = TrainConfig(model=groups.ModelConfig(dtype="bfloat16"))
    small = contract_for(config, hf_config, aligned=True)
    (sizes,) = small.shapes.delta
    of_layer = 4 * 6 * 16 * state_rows(24, 16) + 2 * 3 * sizes.channels
    assert state_bytes(hf_config, small) == 2 * of_layer
    wide = dataclasses.replace(sizes, value_heads=1 << 10, key_dim=1 << 10)
    large = dataclasses.replace(small, shapes=dataclasses.replace(small.shapes, delta=(wide,)))
    fitting = CACHE_BYTES // state_bytes(hf_config, large) // STATES
    dense = dataclasses.replace(small, shapes=dataclasses.replace(small.shapes, delta=()))
    wanted = [(small, STATES * 8), (large, STATES * max(fitting, 1)), (dense, 0)]
    for contract, expected in wanted:
        assert state_slots(hf_config, contract, requests=7) == expected
    assert state_slots(hf_config, dataclasses.replace(small, device="cuda"), 7) == 0


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
        one = longest + CACHE_MARGIN
        assert cache_tokens(hf_config, contract, one, requests) == expected
