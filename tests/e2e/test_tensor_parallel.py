"""A rollout on two tensor-parallel ranks and a trainer on one: the same bits, and how a miss shows."""

import base64
import itertools
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from onpolicy.errors import WeightSyncError
from onpolicy.models.align import AlignedLinear
from onpolicy.ops.row_parallel import RowParallel
from onpolicy.parity import compare_log_probs
from onpolicy.weights.push import push_weights
from onpolicy.weights.transports.shared_memory import SharedMemoryTransport
from tests.support.engines_fixture import make_engines, make_requests, running
from tests.support.processes import engine_processes, listening_addresses

pytestmark = pytest.mark.engine

versions = itertools.count(1)


@pytest.fixture(scope="module")
def engines(checkpoint, tmp_path_factory):
    """A server of two ranks and a trainer in float32."""
    directory = tmp_path_factory.mktemp("tp")
    with running(make_engines(checkpoint, directory, tp_size=2)) as pair:
        yield pair


def count_mismatches(engines, seed):
    sampled = make_requests(16, seed=seed, temperature=0.7)
    completions = engines.generate(sampled)
    scored = engines.trainer.log_probs(
        [r.prompt_ids + c.response_ids for r, c in zip(sampled, completions, strict=True)],
        [len(request.prompt_ids) for request in sampled],
        0.7,
    )
    log_probs = torch.tensor([x for c in completions for x in c.rollout_log_probs])
    return compare_log_probs(torch.cat(scored), log_probs)[0].num_mismatched


def test_no_token_differs(engines):
    assert engines.contract.row_parallel_blocks == 2
    assert engines.rollout.clients[0].report()["tp_size"] == 2
    assert count_mismatches(engines, seed=30) == 0


def test_its_ranks_meet_where_nobody_else_comes(engines):
    processes = engine_processes(engines.rollout.servers[0])
    assert {"scheduler_TP0", "scheduler_TP1"} <= processes.keys()
    assert listening_addresses(processes.values()) == {"127.0.0.1"}


class Rounded(RowParallel):
    """Rounds every rank's part before the sum, as an all-reduce in bfloat16 does."""

    def sum(self, partials):
        return super().sum([partial.bfloat16().float() for partial in partials])


def test_a_trainer_that_rounds_the_parts_of_a_sum_differs(engines, monkeypatch):
    cut = [
        module
        for module in engines.trainer.model.modules()
        if isinstance(module, AlignedLinear) and module.row_parallel.blocks > 1
    ]
    assert len(cut) == 4
    for module in cut:
        monkeypatch.setattr(module, "row_parallel", Rounded(module.row_parallel.blocks))
    assert count_mismatches(engines, seed=31) > 0


class LastRankGetsAnotherBit:
    """A client whose pushes give the last rank one weight that differs in its last bit."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        return getattr(self.client, name)

    def post(self, path, body, num_bytes=0):
        if payloads := body.get("serialized_named_tensors"):
            named = pickle.loads(base64.b64decode(payloads[-1]))
            name, tensor = named[0]
            tensor = tensor.clone().share_memory_()
            tensor.view(torch.int32).view(-1)[7] ^= 1
            other = ForkingPickler.dumps([(name, tensor), *named[1:]])
            payloads = [*payloads[:-1], base64.b64encode(other).decode()]
            body = {**body, "serialized_named_tensors": payloads}
        return self.client.post(path, body, num_bytes)


def test_a_rank_that_got_other_weights_stops_the_run(engines):
    buckets = engines.trainer.weight_buckets(1 << 20)
    clients = [LastRankGetsAnotherBit(client) for client in engines.rollout.clients]
    with pytest.raises(WeightSyncError, match=r"weights=ranks differ: \['\w{16}', '\w{16}'\]"):
        push_weights(buckets, clients, SharedMemoryTransport(), str(next(versions)))
    engines.push_weights(str(next(versions)))
    assert count_mismatches(engines, seed=32) == 0
