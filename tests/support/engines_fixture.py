"""A real SGLang server and a real trainer under one contract, for tests to share."""

import copy
import dataclasses
import random
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.tensor import DTensor

from onpolicy.config import TrainConfig, groups
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.sample_requests import sampling_seed
from onpolicy.rollout.server import EngineServer
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import make_rollout_group
from onpolicy.training import distributed
from onpolicy.types import Request, SamplingParams
from tests.support.forked_processes import forked_processes

CHUNKED_PREFILL_SIZE = 48


def make_engines(
    checkpoint,
    directory,
    dtype="float32",
    tp_size=1,
    make_rollout=make_rollout_group,
    lora=None,
    algorithm=None,
    sglang_args=(),
    aligned=True,
    parity_check="sampled",
    images=False,
    **engine,
):
    """An engine pair, not started yet; `tp_size` is the rollout's."""
    distributed.init_process_group()
    hf_config = load_config(str(checkpoint))
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=str(checkpoint), dtype=dtype, images=images),
        rollout=groups.RolloutConfig(num_rollout=1, rollout_batch_size=1, n_samples_per_prompt=2),
        engine=groups.EngineConfig(cpu_threads=1, **engine),
        trainer=groups.TrainerConfig(lr=1e-3, max_tokens_per_gpu=500),
        lora=lora or groups.LoraConfig(),
        algorithm=algorithm or groups.AlgorithmConfig(),
        parity=groups.ParityConfig(true_on_policy_mode=aligned, parity_check=parity_check),
        sync=groups.WeightSyncConfig(update_weight_buffer_size=1),
        sglang_args=(
            "--chunked-prefill-size",
            str(CHUNKED_PREFILL_SIZE),
            "--tp-size",
            str(tp_size),
            *sglang_args,
        ),
    )
    contract = contract_for(config, hf_config, aligned=aligned)
    return EnginePair(config, hf_config, contract, directory, make_rollout=make_rollout)


@contextmanager
def served(spec, log, port=0):
    """A server of its own, until it is left; 0: at any port that is free."""
    server = EngineServer(spec, port, log)
    try:
        server.start()
        server.wait_until_healthy(300)
        yield server
    finally:
        server.stop()


@contextmanager
def running(pair, anew=False):
    """Start a pair, push the checkpoint's weights as version 0, and stop it afterwards.

    anew: not forked, but as a user's run would start it.
    """
    try:
        with forked_processes(not anew):
            pair.start()
        pair.push_weights(0)
        yield pair
    finally:
        pair.stop()


@contextmanager
def hanging_is_noticed(pair, after):
    """Give up engines that answer no health check for `after` seconds.

    Only where one hangs or dies: on a busy machine others may be given up with it, and start again.
    """
    group = pair.rollout
    config = dataclasses.replace(group.config, rollout_health_timeout=after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "config", config)
        for client in group.clients:
            patch.setattr(client, "health_timeout", after)
        yield


@pytest.fixture(scope="session")
def session_engines(checkpoint, tmp_path_factory):
    """One server and one trainer in float32, and the checkpoint's weights, which no test changes."""
    with running(make_engines(checkpoint, tmp_path_factory.mktemp("engines"))) as pair:
        yield pair, copy.deepcopy(pair.trainer.policy.module.state_dict())


@pytest.fixture(scope="module")
def engines(session_engines):
    """The session's pair, with the checkpoint's weights whatever an earlier file left in it."""
    pair, weights = session_engines
    pair.trainer.policy.module.load_state_dict(weights)
    pair.push_weights(0)
    return pair


def nudge(trainer):
    """Another last bit at every 50th place of every float32 parameter, as a small update makes them."""
    for parameter in trainer.policy.module.parameters():
        part = parameter.detach()
        part = part.to_local() if isinstance(part, DTensor) else part
        part.view(-1).view(torch.int32)[::50] ^= 1


def make_requests(count, seed, *, max_new_tokens=24, temperature=1.0):
    """Requests of random lengths that share prefixes; some are longer than a prefill chunk."""
    rng = random.Random(seed)
    shared = [rng.randrange(137) for _ in range(100)]
    params = SamplingParams(
        temperature=temperature, max_new_tokens=max_new_tokens, stop_token_ids=(), ignore_eos=True
    )
    return [
        Request(
            prompt_ids=shared[: rng.randrange(100)]
            + [rng.randrange(137) for _ in range(rng.randrange(1, 60))],
            sampling_seed=sampling_seed(seed, i),
            params=params,
        )
        for i in range(count)
    ]
