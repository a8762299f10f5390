"""Weights that are not trained go to an engine once, and every push proves them anew."""

import pytest
import torch

from onpolicy.errors import WeightSyncError
from onpolicy.train import distributed
from tests.support.engines_in_memory import Host, make_requests
from tests.support.tiny_policy import ALIGNED, STOCK
from tests.support.trainer_in_memory import make_pair
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
