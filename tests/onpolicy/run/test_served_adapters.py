"""Adapters whose stock engines have SGLang's own: each push brings them alone."""

from functools import partial

import pytest
import torch

from onpolicy.errors import WeightSyncError
from onpolicy.models.peft_format import named_for_peft
from onpolicy.outputs.metrics import read_jsonl
from onpolicy.parity import compare_log_probs
from onpolicy.run.commands.verify import fill_with_drawn
from tests.onpolicy.run.test_moved_adapters import REQUESTS, are_equal
from tests.onpolicy.train.test_merging import parts_of, whole
from tests.support.policies_in_memory import run_policy
from tests.support.stock_pairs import stock_pairs
from tests.support.tiny_combinations import make_base
from tests.support.unstarted_run import changed

SERVED = {
    "true_on_policy_mode": False,
    "lora_rank": 4,
    "lora_rslora": True,
    "rollout_lora": "sglang",
    "weight_sync": "tensor",
}


@pytest.fixture
def served(tmp_path):
    """Starts a pair."""
    with stock_pairs(tmp_path) as started:
        yield partial(started, **SERVED)


def push(pair, version):
    """Adapters that every version has others of; returns what its engines hold of them then."""
    fill_with_drawn(pair.trainer, version)
    pair.push_weights(version)
    assert {client.report()["weights"] for client in pair.rollout.clients} == {pair.weight_digest}
    return [held(client.memory) for client in pair.rollout.clients]


def held(memory):
    return {name: memory.weights[name].clone() for name in memory.served}


def trained(pair):
    return whole(named_for_peft([[*whole(parts_of(pair.trainer)["trained"]).items()]]))


def k3(pair):
    completions = pair.generate(REQUESTS)
    scores = pair.score(REQUESTS, completions, 0.75)
    sampled = torch.cat([torch.tensor(c.rollout_log_probs) for c in completions])
    return compare_log_probs(torch.cat(scores), sampled)[0].metrics()["train/k3_kl"]


def test_each_push_brings_the_adapters_of_its_version_and_nothing_else(served):
    pair = served(rollout_num_engines=2)
    base = whole(parts_of(pair.trainer)["frozen"])
    for version in range(3):
        assert all(are_equal(found, trained(pair)) for found in push(pair, version))
        for client in pair.rollout.clients:
            memory = client.memory
            assert len(memory.loaded) == (version + 1) * len(memory.served)
            assert not base.keys() & set(memory.loaded) and memory.version == version
        assert 0 < k3(pair) < 1e-3
    assert not pair.trainer.outlet.metrics  # nothing was merged
    fill_with_drawn(pair.trainer, 99)  # which no engine has
    assert k3(pair) > 1e-3


@pytest.mark.parametrize("lag", [0, 1])
def test_an_engine_that_dies_gets_the_adapters_of_its_version_again(served, lag):
    pair = served(rollout_lag=lag)
    for version in range(2):
        (pushed,) = push(pair, version)
        if lag:
            fill_with_drawn(pair.trainer, 99)  # which the engine is not to see
        (server,) = pair.rollout.servers
        server.stop()
        assert len(pair.generate(REQUESTS)) == len(REQUESTS)
        assert are_equal(held(server.memory), pushed)
        assert server.memory.version == version
        assert len(server.memory.loaded) == len(pushed)


def test_an_engine_that_holds_other_adapters_than_were_sent_ends_the_run(served):
    pair = served()
    (client,) = pair.rollout.clients
    client.memory.flips_a_bit = True
    with pytest.raises(WeightSyncError, match="does not hold the weights that were sent"):
        push(pair, 0)


def test_engines_on_other_hosts_are_refused(served, monkeypatch):
    pair = served()
    monkeypatch.setattr(type(pair.trainer.outlet.transport), "is_near", lambda *_: False)
    with pytest.raises(WeightSyncError, match=r"--rollout-lora=sglang: http\S* are on other hosts"):
        push(pair, 0)


@pytest.mark.parametrize("schedule", [{}, {"rollout_lag": 1}, {"rollout_schedule": "free"}])
def test_a_run_trains_on_what_they_sample(tmp_path, schedule):
    config = changed(make_base(tmp_path), **SERVED, use_tis=True, **schedule)
    summary, _ = run_policy(config)
    assert summary.rollouts == 2
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert 0 < records[0]["train/k3_kl"] < 1e-3  # later samples lag, and are not compared by it
    assert not any(name.startswith("lora/merged") for record in records for name in record)
