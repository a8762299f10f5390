"""Adapters of a stock server that has SGLang's own: it keeps its base, and pushes bring them alone."""

import asyncio

import aiohttp
import pytest
import torch

from onpolicy.config import groups
from onpolicy.errors import ContractError, EngineError
from onpolicy.parity import compare_log_probs
from onpolicy.run.commands.verify import fill_with_drawn
from tests.support.engines_fixture import make_engines, make_requests, running

pytestmark = [pytest.mark.engine]

CLOSE = 1e-11
"""k3 in nats per token of two kernels in float32, of the same weights."""


@pytest.fixture(scope="module")
def pair(checkpoint, tmp_path_factory):
    lora = groups.LoraConfig(lora_rank=8, lora_rslora=True, rollout_lora="sglang")
    directory = tmp_path_factory.mktemp("run")
    with running(make_engines(checkpoint, directory, lora=lora, aligned=False)) as pair:
        yield pair


def push(pair, seed):
    fill_with_drawn(pair.trainer, seed)
    pair.push_weights(pair.weight_version + 1)
    (client,) = pair.rollout.clients
    assert client.report()["weights"] == pair.weight_digest


def k3(pair):
    """Of answers to requests that share prefixes."""
    requests = make_requests(6, seed=3)
    completions = pair.generate(requests)
    assert {c.weight_version for c in completions} == {pair.weight_version}
    rollout = torch.cat([torch.tensor(c.rollout_log_probs) for c in completions])
    scores = torch.cat(pair.score(requests, completions, 1.0))
    return compare_log_probs(scores, rollout)[0].metrics()["train/k3_kl"]


def test_it_samples_from_the_adapters_of_each_push(pair):
    for seed in (0, 1):
        push(pair, seed)
        assert k3(pair) < CLOSE
    fill_with_drawn(pair.trainer, 2)  # which it was not pushed
    assert k3(pair) > 1e3 * CLOSE


def test_with_another_scale_it_samples_from_another_model(pair, monkeypatch):
    config = pair.trainer.outlet.transport._config
    monkeypatch.setitem(config, "lora_alpha", 1.01 * config["lora_alpha"])
    push(pair, 0)
    assert k3(pair) > 1e3 * CLOSE


def test_what_it_cannot_compute_is_refused_and_the_base_never_answers_in_its_place(
    pair, monkeypatch
):
    push(pair, 0)
    with monkeypatch.context() as patch:
        patch.setitem(pair.trainer.outlet.transport._config, "use_dora", True)
        with pytest.raises(EngineError, match="doesn't support DoRA"):
            pair.push_weights(pair.weight_version + 1)
    (client,) = pair.rollout.clients
    with pytest.raises(ContractError, match="HTTP 400"):
        asyncio.run(ask(client))  # what was there was unloaded
    push(pair, 0)
    assert k3(pair) < CLOSE


async def ask(client):
    async with aiohttp.ClientSession() as session:
        return await client.generate(session, make_requests(1, seed=3)[0])
