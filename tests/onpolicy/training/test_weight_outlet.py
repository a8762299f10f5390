"""Weights that are not trained go to an engine once, and every push proves them anew."""

from itertools import product

import pytest
import torch

from onpolicy.config import TrainConfig, groups
from onpolicy.config.groups import EngineConfig
from onpolicy.errors import EngineError, WeightSyncError
from onpolicy.training import distributed
from onpolicy.weights.transports.shared_memory import SharedMemoryTransport
from tests.support.engines_in_memory import Host, make_requests
from tests.support.ranks import on_ranks
from tests.support.tiny_policy import ALIGNED, STOCK
from tests.support.trainer_in_memory import TrainerInMemory, make_pair
from tests.support.weight_digests import digest_of

FROZEN, TRAINED = "before.weight", "two_before.weight"


@pytest.fixture
def start(tmp_path):
    """Starts pairs of which a part of the weights is frozen, and pushes once."""

    def started(contract=ALIGNED, frozen=(FROZEN,), engines=2, **changes):
        distributed.init_process_group()
        pair = make_pair(Host(), tmp_path, contract, rollout_num_engines=engines, **changes)
        pair.start()
        pair.trainer.frozen = frozen
        pair.push_weights(0)
        return pair

    return started


def train(pair):
    pair.trainer.weights[TRAINED] += 0.25


def engines_of(pair):
    return [client.memory for client in pair.rollout.clients]


def flip(tensor):
    tensor.view(torch.int32)[3, 4] ^= 1


@pytest.mark.parametrize("way", ["disk", "tensor"])
def test_frozen_weights_go_with_the_first_push_and_the_digest_is_of_all(start, way):
    pair = start(weight_sync=way)
    for version in (1, 2):
        train(pair)
        pair.push_weights(version)
        assert pair.weight_digest == digest_of(pair.trainer.weights)
    for engine in engines_of(pair):
        assert engine.loaded == [FROZEN, TRAINED, TRAINED, TRAINED] and engine.version == 2
        assert engine.report()["weights"] == pair.weight_digest
        assert torch.equal(engine.weights[FROZEN], pair.trainer.weights[FROZEN])


@pytest.mark.parametrize("lag", [0, 1])
def test_an_engine_that_was_started_again_gets_them_too(start, lag):
    pair = start(engines=1, lag=lag)
    for version in (1, 2):
        train(pair)
        pair.push_weights(version)
    pushed = pair.weight_digest
    (server,) = pair.rollout.servers
    server.stop()
    if lag:
        train(pair)  # which the engine is not to see
    requests = make_requests(3)
    assert len(pair.generate(requests)) == len(requests)
    (engine,) = engines_of(pair)
    assert engine.loaded == [FROZEN, TRAINED] and engine.report()["weights"] == pushed
    train(pair)
    pair.push_weights(3)
    assert engine.loaded == [FROZEN, TRAINED, TRAINED]
    assert pair.weight_digest == digest_of(pair.trainer.weights)


def test_a_frozen_weight_that_changed_in_an_engine_is_refused(start):
    pair = start()
    flip(engines_of(pair)[1].weights[FROZEN])
    url = pair.rollout.clients[1].url
    with pytest.raises(WeightSyncError, match=rf"^{url}: weights=\w+ after push 1, the trainer's"):
        pair.push_weights(1)


def test_a_frozen_weight_that_changed_in_the_trainer_is_refused(start):
    pair = start()
    pair.push_weights(1)
    flip(pair.trainer.weights[FROZEN])
    with pytest.raises(WeightSyncError, match=r"ranks=\[0\]: weights that are not trained"):
        pair.push_weights(2)


@pytest.mark.parametrize("changes", [{"contract": STOCK}, {"colocate": True}])
def test_engines_that_cannot_prove_them_or_give_memory_back_get_them_every_time(start, changes):
    pair = start(**changes)
    pair.push_weights(1)
    for engine in engines_of(pair):
        assert engine.loaded == [FROZEN, TRAINED] * 2


def test_where_all_is_trained_every_push_has_all_in_the_models_order(start):
    pair = start(frozen=())
    for version in (1, 2):
        train(pair)
        pair.push_weights(version)
    for engine in engines_of(pair):
        assert engine.loaded == [FROZEN, TRAINED] * 3
        assert engine.report()["weights"] == digest_of(pair.trainer.weights)


FROZEN, TRAINED = "before.weight", "two_before.weight"


class Spread(SharedMemoryTransport):
    """Engines of one host that each have a rank for themselves, as on GPUs."""

    one_copy = False


class Cluster:
    """Ranks of a trainer, and the engines that they send to."""

    def __init__(self, directory, ranks, engines, way="spread", contract=ALIGNED, lag=0, **sync):
        self.num_ranks, self.host = ranks, Host()
        self.group = self.host.make_group(EngineConfig(rollout_num_engines=engines), contract)
        self.group.launch()
        config = TrainConfig(
            engine=EngineConfig(rollout_num_engines=engines),
            parity=groups.ParityConfig(true_on_policy_mode=True),
            sync=groups.WeightSyncConfig(weight_sync="tensor" if way == "spread" else way, **sync),
            rollout=groups.RolloutConfig(rollout_lag=lag),
            output=groups.OutputConfig(run_dir=str(directory)),
        )
        self.trainers = [TrainerInMemory(config, contract, directory) for _ in range(ranks)]
        for trainer in self.trainers:
            trainer.frozen = (FROZEN,)
            if way == "spread":
                trainer.transport = Spread()

    def push(self, version, verb="push"):
        """What each rank returned or raised."""
        engines = self.group.clients
        return on_ranks(
            self.num_ranks, lambda rank: getattr(self.trainers[rank], verb)(engines, version)
        )

    def train(self):
        for trainer in self.trainers:
            trainer.weights[TRAINED] += 0.25

    def require_pushed(self, digests, version):
        want = digest_of(self.trainers[0].weights)
        assert digests == [want] * self.num_ranks
        for engine in self.host.engines:
            assert engine.report()["weights"] == want
            assert engine.memory.version == version and not engine.memory.in_session
            for name, tensor in self.trainers[0].weights.items():
                assert torch.equal(engine.memory.weights[name], tensor)


@pytest.mark.parametrize("way", ["spread", "tensor", "disk"])
@pytest.mark.parametrize(("ranks", "engines"), product((1, 2, 3), (1, 2, 3)))
def test_all_engines_hold_the_bits_and_frozen_ones_travel_once(tmp_path, ranks, engines, way):
    cluster = Cluster(tmp_path, ranks, engines, way)
    for version in range(3):
        cluster.require_pushed(cluster.push(version), version)
        cluster.train()
    for engine in cluster.host.engines:
        assert engine.memory.loaded == [FROZEN, TRAINED, TRAINED, TRAINED]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("again", [0, 1])
def test_an_engine_that_was_started_again_costs_the_others_no_bit(tmp_path, again):
    cluster = Cluster(tmp_path, 2, 2)
    cluster.push(0)
    cluster.train()
    cluster.host.engines[again].stop()
    for outcome in cluster.push(1):  # every rank learns of it, after the other has ended its push
        assert isinstance(outcome, EngineError) and cluster.host.engines[again].url in str(outcome)
    cluster.host.engines[again].start()
    cluster.require_pushed(cluster.push(1), 1)
    cluster.train()
    cluster.require_pushed(cluster.push(2), 2)


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_what_rank_0_kept_of_a_lagging_push_goes_to_all_engines(tmp_path, engines):
    cluster = Cluster(tmp_path, 3, engines, lag=1)
    for trainer in cluster.trainers:  # rank 0 keeps what it sends to nobody
        trainer._senders = lambda engines: [2] * len(engines)
    first = cluster.push(0)
    cluster.host.engines[-1].stop()
    cluster.host.engines[-1].start()
    assert cluster.push(0, "push_again")[0] == first[0]
    cluster.require_pushed(first, 0)
    cluster.train()
    cluster.require_pushed(cluster.push(1), 1)


@pytest.mark.parametrize(("second", "times"), [([0, 0], 1), ([1, 1], 3)])
def test_an_engine_that_nobody_sends_to_or_two_ranks_is_refused(tmp_path, second, times):
    cluster = Cluster(tmp_path, 2, 2, "disk")
    for trainer, senders in zip(cluster.trainers, ([0, 1], second), strict=True):
        trainer._senders = lambda engines, senders=senders: senders
    for outcome in cluster.push(0):
        assert isinstance(outcome, WeightSyncError)
        assert str(outcome).count("http://") == times


def test_ranks_that_hold_other_weights_are_refused_though_each_engine_proves_what_it_got(tmp_path):
    cluster = Cluster(tmp_path, 2, 2)
    cluster.trainers[1].weights[TRAINED].view(torch.int32)[3, 4] ^= 1
    for outcome in cluster.push(0):
        assert isinstance(outcome, WeightSyncError) and "ranks do not agree" in str(outcome)
    for engine in cluster.host.engines:
        assert engine.memory.version == 0
