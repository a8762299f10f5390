"""Pushes of what changed: the bits of whole pushes, and whole ones wherever the base is in doubt."""

import logging
from itertools import product

import pytest
import torch

from onpolicy.errors import EngineError, WeightSyncError
from onpolicy.weights.changes import PLACES, VALUES
from tests.onpolicy.training import test_weight_outlet
from tests.onpolicy.training.test_weight_outlet import FROZEN, TRAINED
from tests.support.tiny_policy import STOCK
from tests.support.weight_digests import digest_of

CHANGES = [TRAINED + PLACES, TRAINED + VALUES]


class Cluster(test_weight_outlet.Cluster):
    """Ranks of a trainer that push changes, and their engines."""

    def __init__(self, directory, ranks=1, engines=1, way="disk", **more):
        super().__init__(directory, ranks, engines, way, sparse_weight_sync=True, **more)

    def push(self, version, verb="push"):
        """What each rank returned or raised, and what came to the last engine."""
        memory = self.host.engines[-1].memory
        memory.came.clear()
        return super().push(version, verb), sorted(memory.came)

    def train(self):
        for trainer in self.trainers:
            trainer.weights[TRAINED][3, 4:6] += 0.25

    def require_held(self, outcomes):
        assert outcomes == [digest_of(self.trainers[0].weights)] * self.num_ranks
        for engine in self.host.engines:
            for name, tensor in self.trainers[0].weights.items():
                assert torch.equal(engine.memory.weights[name], tensor)


@pytest.mark.parametrize("way", ["spread", "tensor", "disk"])
@pytest.mark.parametrize(("ranks", "engines"), product((1, 2), (1, 3)))
def test_after_a_whole_push_only_changes_travel_and_all_engines_hold_the_bits(
    tmp_path, ranks, engines, way
):
    cluster = Cluster(tmp_path, ranks, engines, way)
    for version in range(4):
        outcomes, came = cluster.push(version)
        cluster.require_held(outcomes)
        assert came == ([FROZEN, TRAINED] if version == 0 else CHANGES)
        metrics = cluster.trainers[-1].push_metrics
        assert metrics == {} if version == 0 else metrics["push/changed_share"] == 2 / 144
        assert version == 0 or metrics["push/sent_share"] == 16 / 576
        cluster.train()


def test_an_engine_that_was_started_again_gets_all_and_the_log_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cluster = Cluster(tmp_path, engines=2)
    cluster.push(0)
    cluster.host.engines[0].stop()
    cluster.host.engines[0].start()
    cluster.train()
    caplog.clear()
    outcomes, came = cluster.push(1)
    cluster.require_held(outcomes)
    assert came == [FROZEN, TRAINED]
    assert "version 1: an engine has not proved the last push; it gets all" in caplog.text
    cluster.train()
    outcomes, came = cluster.push(2)
    cluster.require_held(outcomes)
    assert came == CHANGES


def test_what_is_kept_of_a_lagging_push_is_the_base_of_the_next(tmp_path):
    cluster = Cluster(tmp_path, ranks=2, engines=2, way="tensor", lag=1)
    first, _ = cluster.push(0)
    for engine in cluster.host.engines:
        engine.stop()
        engine.start()
    cluster.train()  # which the engines are not to see
    again, came = cluster.push(0, "push_again")
    assert again[0] == first[0] and came == [FROZEN, TRAINED]
    outcomes, came = cluster.push(1)
    cluster.require_held(outcomes)
    assert came == CHANGES


def test_engines_that_are_not_aligned_get_all_and_nothing_is_kept_for_them(tmp_path):
    cluster = Cluster(tmp_path, contract=STOCK)
    for version in range(3):
        outcomes, came = cluster.push(version)
        cluster.require_held(outcomes)
        assert came == [FROZEN, TRAINED] and not cluster.trainers[0]._last._held
        cluster.train()


def flip_the_base(cluster):
    cluster.host.engines[-1].memory.weights[TRAINED].view(torch.int32)[7, 7] ^= 1


def flip_the_copy(cluster):
    """The place that it hides is not sent: what a snapshot ahead of its engines does."""
    cluster.trainers[0]._last._held[TRAINED].copy_(cluster.trainers[0].weights[TRAINED])


def on_the_way(change):
    def make(cluster):
        last = cluster.trainers[0]._last

        def changes(bucket):
            del last.changes
            return change(last.changes(bucket))

        last.changes = changes

    return make


def flip_a_place(sent):
    (name, places), values = sent
    return [(name, places ^ 1), values]


def flip_a_value(sent):
    places, (name, values) = sent
    return [places, (name, (values.view(torch.int32) ^ 1).view(values.dtype))]


def lose_a_place(sent):
    return [(name, part[1:]) for name, part in sent]


WRONG = {
    "base": flip_the_base,
    "copy": flip_the_copy,
    "place": on_the_way(flip_a_place),
    "value": on_the_way(flip_a_value),
    "lost": on_the_way(lose_a_place),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_changes_are_refused_by_the_digest_and_the_next_push_brings_all(tmp_path, wrong):
    cluster = Cluster(tmp_path)
    cluster.push(0)
    cluster.train()
    cluster.push(1)
    cluster.train()
    WRONG[wrong](cluster)
    (outcome,), came = cluster.push(2)
    assert isinstance(outcome, WeightSyncError) and "after push 2, the trainer's are" in str(
        outcome
    )
    assert came == CHANGES
    outcomes, came = cluster.push(2)
    cluster.require_held(outcomes)
    assert came == [FROZEN, TRAINED]


def test_changes_that_did_not_arrive_are_not_taken_for_held(tmp_path, monkeypatch):
    """Else they were never sent again: a copy ahead of its engines (THUDM/slime#2104)."""
    cluster = Cluster(tmp_path)
    cluster.push(0)
    cluster.train()
    transport = cluster.trainers[0].transport

    def fail(*_):
        raise EngineError("lost")

    monkeypatch.setattr(transport, "close", fail)
    (outcome,), came = cluster.push(1)
    assert isinstance(outcome, EngineError) and came == []
    monkeypatch.undo()
    outcomes, came = cluster.push(1)
    cluster.require_held(outcomes)
    assert came == [FROZEN, TRAINED]
