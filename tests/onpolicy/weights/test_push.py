"""A push to engines in memory, by files and by shared memory; tests/e2e pushes to real ones."""

import threading

import pytest
import torch

from onpolicy.config.groups import EngineConfig
from onpolicy.errors import EngineError, WeightSyncError
from onpolicy.rollout.base import SamplingJob
from onpolicy.rollout.client import EngineLostError
from onpolicy.weights.push import Transport, push_weights
from onpolicy.weights.transports import make_transport
from tests.support.engines_in_memory import Host, make_requests
from tests.support.tiny_policy import make_weights
from tests.support.weight_digests import digest_of

TRAINED = make_weights(seed=1)
BUCKETS = [[item] for item in TRAINED.items()]


@pytest.fixture(params=["disk", "tensor"])
def push(request, tmp_path):
    """Pushes to engines, of trained weights unless told otherwise."""
    transport = make_transport(request.param, tmp_path)

    def push_to(engines, buckets=BUCKETS, version=7):
        return push_weights(buckets, engines, transport, version)

    yield push_to
    assert list(tmp_path.iterdir()) == []  # whatever became of the push


@pytest.fixture
def engines():
    host = Host()
    group = host.make_group(EngineConfig(rollout_num_engines=3))
    group.launch()
    return host.engines


def test_every_engine_holds_the_bits_and_the_digest_is_theirs(push, engines):
    assert push(engines) == digest_of(TRAINED)
    for engine in engines:
        assert engine.report()["weights"] == digest_of(TRAINED)
        assert engine.memory.version == 7 and not engine.memory.in_session
        assert all(torch.equal(engine.memory.weights[name], TRAINED[name]) for name in TRAINED)


def test_what_an_engine_has_cached_of_older_weights_is_gone(push, engines):
    group = Host().make_group(EngineConfig())
    requests = make_requests(5)
    for engine in group.servers:
        engine.start()
    before = group.generate(SamplingJob(requests))
    push(group.clients)
    after = group.generate(SamplingJob(requests))
    assert [completion.num_cached_tokens for completion in after] == [0] * len(requests)
    assert all(
        a.rollout_log_probs != b.rollout_log_probs for a, b in zip(after, before, strict=True)
    )


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_one_engine_with_one_other_bit_is_an_error_that_names_it(push, engines, wrong):
    engines[wrong].memory.flips_a_bit = True
    message = rf"^{engines[wrong].url}: weights=\w{{16}} after push 7, the trainer's are \w{{16}}:"
    with pytest.raises(WeightSyncError, match=message):
        push(engines)


def test_a_push_after_one_that_broke_replaces_all_of_it(push, engines):
    def breaks():
        yield BUCKETS[1]
        raise EngineError("broken")

    with pytest.raises(EngineError, match="broken"):
        push(engines, breaks(), version=6)
    assert push(engines) == digest_of(TRAINED)
    assert {engine.report()["weights"] for engine in engines} == {digest_of(TRAINED)}


def test_an_engine_that_is_gone_is_an_error_and_the_others_are_waited_for(push, engines):
    engines[1].stop()
    with pytest.raises(EngineLostError, match=engines[1].url):
        push(engines)


class Recorded(Transport):
    """Reaches nobody; `on_send` is given the name of each bucket's first tensor."""

    in_session = False

    def __init__(self, on_send):
        self.on_send, self.sent, self.is_abandoned = on_send, [], False

    def send(self, bucket, engines, version):
        self.sent.append(bucket[0][0])
        self.on_send(bucket[0][0])

    def abandon(self):
        self.is_abandoned = True


def test_a_bucket_is_gathered_while_the_one_before_travels_and_one_travels_at_a_time():
    gathered = {name: threading.Event() for name in [*TRAINED, "all"]}
    next_of = dict(zip(gathered, [*TRAINED][1:] + ["all"], strict=False))

    def buckets():
        for bucket in BUCKETS:
            gathered[bucket[0][0]].set()
            yield bucket
        gathered["all"].set()

    transport = Recorded(lambda name: waited.append(gathered[next_of[name]].wait(100)))
    waited = []
    push_weights(buckets(), [], transport, "7")
    assert transport.sent == [*TRAINED] and all(waited)


def test_after_a_bucket_that_could_not_be_sent_none_is():
    def fail(name):
        if name == [*TRAINED][1]:
            raise EngineError(name)

    transport = Recorded(fail)
    with pytest.raises(EngineError, match=[*TRAINED][1]):
        push_weights(BUCKETS, [], transport, "7")
    assert transport.sent == [*TRAINED][:2] and transport.is_abandoned
