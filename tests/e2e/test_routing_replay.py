"""Rollout routing replay with the real SGLang, whose stock experts and router are its own.

Whether stock routers differ is up to the machine's kernels, so the engine's have other weights here.
"""

from dataclasses import replace

import pytest
import torch

from onpolicy.config import TrainConfig
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.sample_requests import trajectories_of
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import replays_routing
from onpolicy.training import distributed
from onpolicy.types import Prompt, Sample
from onpolicy.weights.push import push_weights
from onpolicy.weights.transports.shared_memory import SharedMemoryTransport
from tests.support.engines_fixture import make_requests, running
from tests.support.tiny import make_checkpoint
from tests.support.unstarted_run import changed

pytestmark = pytest.mark.engine

LAYERS, K = 2, 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    distributed.init_process_group()
    path = str(make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3-moe"))
    hf_config = load_config(path)
    config = changed(
        TrainConfig(), hf_checkpoint=path, dtype="bfloat16", num_rollout=1, rollout_batch_size=1,
        n_samples_per_prompt=2, cpu_threads=1, max_tokens_per_gpu=500,
        use_rollout_routing_replay=True, get_mismatch_metrics=True,
        sglang_args=("--chunked-prefill-size", "48"),
    )  # fmt: skip
    contract = contract_for(config, hf_config, aligned=False)
    directory = tmp_path_factory.mktemp("run")
    with running(EnginePair(config, hf_config, contract, directory)) as pair:
        yield pair


@pytest.fixture(scope="module")
def rollout(pair):
    assert replays_routing(pair.config, pair.contract)
    buckets = with_other_routers(pair.trainer.policy.weight_buckets(1 << 20))
    push_weights(buckets, pair.rollout.clients, SharedMemoryTransport(), "other routers")
    requests = [
        replace(request, params=replace(request.params, return_routed_experts=True))
        for request in make_requests(24, seed=3)
    ]
    return requests, pair.generate(requests)


def with_other_routers(buckets):
    """A tenth of their weights' spread away: enough for some tokens to go to other experts."""
    generator = torch.Generator().manual_seed(0)
    for bucket in buckets:
        for i, (name, tensor) in enumerate(bucket):
            if name.endswith("mlp.gate.weight"):
                noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                bucket[i] = name, tensor + 0.1 * tensor.std() * noise
        yield bucket


def train_samples(requests, completions):
    return [
        Sample(
            prompt=Prompt(index=i, prompt_ids=request.prompt_ids, label="", text=""),
            sample_index=0,
            trajectory=trajectory,
            reward=(-1.0) ** i,
            group=0,
            episode=i,
        )
        for i, (request, trajectory) in enumerate(
            zip(requests, trajectories_of(requests, completions), strict=True)
        )
    ]


def test_every_token_but_the_last_comes_with_its_experts_cached_prefixes_too(rollout):
    requests, completions = rollout
    assert any(completion.num_cached_tokens for completion in completions)
    for request, completion in zip(requests, completions, strict=True):
        tokens = len(request.prompt_ids) + len(completion.response_ids)
        assert completion.routed_experts.shape == (tokens - 1, LAYERS * K)
        chosen = torch.from_numpy(completion.routed_experts.copy()).view(-1, LAYERS, K)
        assert (chosen[..., 0] != chosen[..., 1]).all()  # distinct: no row was left unwritten


def test_replay_brings_the_engines_closer(pair, rollout):
    metrics = pair.trainer.train(train_samples(*rollout), step=0, rates=[0.0]).metrics
    assert 0 < metrics["routing/differing_share"] < 0.5
    assert metrics["mismatch/k3"] < metrics["routing/k3_without_replay"]


def test_without_being_asked_nothing_is_returned(pair):
    assert all(c.routed_experts is None for c in pair.generate(make_requests(2, seed=4)))
