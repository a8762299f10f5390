"""Pushing weights into a real server, in every way, and finding out when a push went wrong."""

import dataclasses
import itertools

import pytest
import torch

from onpolicy.config import groups
from onpolicy.errors import EngineError, WeightSyncError
from onpolicy.training.weight_outlet import WeightOutlet
from onpolicy.weights.push import push_weights
from onpolicy.weights.transports import make_transport
from onpolicy.weights.transports.shared_memory import SharedMemoryTransport
from tests.support.engines_fixture import make_requests, nudge

pytestmark = pytest.mark.engine

versions = itertools.count(1)
BUCKET_BYTES = 60_000


@pytest.fixture
def client(engines):
    """The server; it gets the trainer's weights back afterwards."""
    yield engines.rollout.clients[0]
    engines.push_weights(next(versions))


def perturb(trainer):
    """New weights, as different in every trained parameter as a real update would make them."""
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, trainer.policy.module.parameters()):
            parameter.mul_(1 + 0.01 * torch.rand(()).item())


def mismatches(engines, version):
    sampled = make_requests(6, seed=20)
    completions = engines.generate(sampled)
    assert {completion.weight_version for completion in completions} == {version}
    scored = engines.trainer.log_probs(
        [[*r.prompt_ids, *c.response_ids] for r, c in zip(sampled, completions, strict=True)],
        [len(request.prompt_ids) for request in sampled],
        1.0,
    )
    log_probs = [x for c in completions for x in c.rollout_log_probs]
    return int((torch.cat(scored) != torch.tensor(log_probs)).sum()), completions


def test_a_server_that_gave_its_memory_back_has_the_next_push_whole(engines, client):
    """Weights before it, the cache after it; on a CPU the memory itself stays where it is."""
    engines.rollout.release_memory()
    perturb(engines.trainer)
    version = next(versions)
    engines.push_weights(version)
    wrong, _ = mismatches(engines, version)
    assert wrong == 0
    assert client.report()["weights"] == engines.weight_digest


@pytest.mark.parametrize("way", ["tensor", "distributed", "disk"])
def test_new_weights_arrive_bit_for_bit(engines, client, way, tmp_path):
    before = engines.generate(make_requests(6, seed=20))
    perturb(engines.trainer)
    version = next(versions)
    buckets = list(engines.trainer.policy.weight_buckets(BUCKET_BYTES))
    assert len(buckets) > 3
    transport = make_transport(way, tmp_path)
    digest = push_weights(buckets, [client], transport, version)
    transport.end()
    assert client.report()["weights"] == digest
    wrong, after = mismatches(engines, version)
    assert wrong == 0
    assert [c.rollout_log_probs for c in after] != [c.rollout_log_probs for c in before]
    assert list(tmp_path.iterdir()) == []


class Named(SharedMemoryTransport):
    def __init__(self):
        super().__init__()
        self.names = []

    def send(self, bucket, engines, version):
        self.names += [name for name, _ in bucket]
        super().send(bucket, engines, version)


def test_frozen_weights_travel_once_and_stay_what_the_server_computes_with(
    engines, client, monkeypatch
):
    policy = engines.trainer.policy
    first_layer = list(policy.module.layers[0].parameters())
    for parameter in first_layer:
        monkeypatch.setattr(parameter, "requires_grad", False)
    outlet = WeightOutlet(engines.config, engines.contract, policy)
    sent = []
    for _ in range(3):
        perturb(engines.trainer)
        version, outlet.transport = next(versions), Named()
        digest = outlet.push([client], version)
        sent.append(outlet.transport.names)
        wrong, _ = mismatches(engines, version)
        assert (wrong, client.report()["weights"]) == (0, digest)
    everything = {name for bucket in policy.weight_buckets(BUCKET_BYTES) for name, _ in bucket}
    assert set(sent[0]) == everything
    assert set(sent[1]) == set(sent[2]) == {n for n in everything if ".layers.0." not in n}
    with torch.no_grad():
        first_layer[0].mul_(1.01)
    with pytest.raises(WeightSyncError, match="weights that are not trained have changed"):
        outlet.push([client], next(versions))


def sparse_outlet(engines, way, directory):
    config = dataclasses.replace(
        engines.config,
        sync=dataclasses.replace(engines.config.sync, weight_sync=way, sparse_weight_sync=True),
        output=groups.OutputConfig(run_dir=str(directory)),
    )
    return WeightOutlet(config, engines.contract, engines.trainer.policy)


@pytest.mark.parametrize("way", ["tensor", "distributed", "disk"])
def test_changes_arrive_bit_for_bit(engines, client, way, tmp_path):
    outlet = sparse_outlet(engines, way, tmp_path)
    for number in range(3):
        nudge(engines.trainer)
        version = next(versions)
        digest = outlet.push([client], version)
        wrong, _ = mismatches(engines, version)
        assert (wrong, client.report()["weights"]) == (0, digest)
        share = outlet.push_metrics.get("push/sent_share")
        assert share is None if number == 0 else share < 0.05
    outlet.close()


def test_changes_against_another_base_are_refused_by_the_server_and_all_follows(
    engines, client, tmp_path
):
    outlet = sparse_outlet(engines, "tensor", tmp_path)
    outlet.push([client], next(versions))
    nudge(engines.trainer)
    new = {name: x for bucket in outlet._source.weight_buckets(BUCKET_BYTES) for name, x in bucket}
    outlet._last._held["model.norm.weight"].copy_(new["model.norm.weight"])
    with pytest.raises(WeightSyncError, match=r"weights=\w{16} after push \d+, the trainer's are"):
        outlet.push([client], next(versions))
    version = next(versions)
    assert outlet.push([client], version) == client.report()["weights"]
    assert mismatches(engines, version)[0] == 0 and not outlet.push_metrics


class Calls:
    def __init__(self, client):
        self.client, self.posted = client, []

    def __getattr__(self, name):
        return getattr(self.client, name)

    def post(self, path, *body):
        self.posted.append(path)
        return self.client.post(path, *body)


def test_a_group_is_formed_once_and_left_when_the_trainer_ends(engines, client):
    calls, transport = Calls(client), make_transport("distributed", None)
    for _ in range(3):
        perturb(engines.trainer)
        buckets = list(engines.trainer.policy.weight_buckets(BUCKET_BYTES))
        digest = push_weights(buckets, [calls], transport, next(versions))
        assert client.report()["weights"] == digest
    assert calls.posted.count("/update_weights_from_distributed") == 3 * len(buckets)
    assert calls.posted.count("/init_weights_update_group") == 1
    transport.end()
    assert calls.posted[-1] == "/destroy_weights_update_group"
    with pytest.raises(EngineError, match="group to be destroyed does not exist"):
        client.post("/destroy_weights_update_group", {"group_name": transport._name})


def test_prefixes_cached_under_old_weights_are_dropped(engines, client):
    sampled = make_requests(4, seed=21)
    engines.generate(sampled)
    assert sum(c.num_cached_tokens for c in engines.generate(sampled)) > 0
    engines.push_weights(next(versions))
    assert engines.generate(sampled[:1])[0].num_cached_tokens == 0


class FlipsABit(SharedMemoryTransport):
    """Sends one weight that differs in its last bit."""

    def send(self, bucket, engines, version):
        name, tensor = bucket[0]
        tensor = tensor.clone()
        tensor.view(torch.int32).view(-1)[7] ^= 1
        super().send([(name, tensor), *bucket[1:]], engines, version)


class LosesATensor(SharedMemoryTransport):
    def send(self, bucket, engines, version):
        kept = [(name, t) for name, t in bucket if name != "model.norm.weight"]
        if kept:
            super().send(kept, engines, version)


@pytest.mark.parametrize("transport", [FlipsABit, LosesATensor])
def test_a_push_that_went_wrong_stops_the_run(engines, client, transport):
    perturb(engines.trainer)
    buckets = engines.trainer.policy.weight_buckets(BUCKET_BYTES)
    with pytest.raises(
        WeightSyncError, match=r"weights=\w{16} after push \d+, the trainer's are \w{16}"
    ):
        push_weights(buckets, [client], transport(), next(versions))
