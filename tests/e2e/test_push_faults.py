"""Engines that die or hang, while weights are pushed or not: started again, pushed to, the same bits."""

import itertools
import signal
import threading

import psutil
import pytest

from onpolicy.config import groups
from onpolicy.config.tool_flags import VerifyConfig
from onpolicy.errors import EngineError
from onpolicy.outputs.metrics import read_jsonl
from onpolicy.rollout.sglang import SglangGroup
from onpolicy.run.commands.verification import draw_adapters
from onpolicy.weights.push import push_weights
from onpolicy.weights.transports import make_transport
from onpolicy.weights.transports.broadcast import ByHostTransport, DistributedTransport
from onpolicy.weights.transports.shared_memory import SharedMemoryTransport
from tests.support.engines_fixture import (
    hanging_is_noticed,
    make_engines,
    make_requests,
    running,
    served,
)
from tests.support.processes import engine_processes, is_gone
from tests.support.train_runs import TWO_RANKS, finish, run_hash

pytestmark = [pytest.mark.engine, pytest.mark.runs]

REQUESTS = make_requests(8, seed=40)
versions = itertools.count(1)


@pytest.fixture(scope="module")
def pair(checkpoint, tmp_path_factory):
    """Two engines, which are started again as often as it takes; adapters change every token.

    They get the base again too, which goes the way of all weights; ranks that push all are below.
    """
    directory = tmp_path_factory.mktemp("faults")
    flags = {"rollout_max_restarts": 1000, "rollout_health_timeout": 300.0}
    lora = groups.LoraConfig(lora_rank=8)
    flags |= {"lora": lora, "rollout_num_engines": 2}
    with running(make_engines(checkpoint, directory, **flags)) as engines:
        draw_adapters(engines, VerifyConfig(lora=lora))
        engines.push_weights(next(versions))
        yield engines


@pytest.fixture(scope="module")
def expected(pair):
    """What the engines sample, and the digest of what they hold."""
    return sampled(pair), pair.weight_digest


def sampled(pair, requests=REQUESTS):
    return [(c.response_ids, c.rollout_log_probs) for c in pair.generate(requests)]


def test_a_push_reaches_an_engine_here_and_one_elsewhere_each_its_way(pair, expected):
    near, far = pair.rollout.clients
    transport = ByHostTransport(SharedMemoryTransport())
    transport.is_near = lambda engine: engine is near
    buckets = pair.trainer.policy.weight_buckets(60_000)
    digest = push_weights(buckets, [near, far], transport, next(versions))
    transport.end()
    assert digest == near.report()["weights"] == far.report()["weights"] == expected[1]
    assert sampled(pair) == expected[0]


def test_a_group_is_kept_from_push_to_push_until_one_of_its_engines_is_started_again(
    pair, expected, monkeypatch
):
    """Killed while idle: no push has failed by which the group could be known to be useless."""
    transport = DistributedTransport()
    monkeypatch.setattr(pair.trainer, "transport", transport)
    groups = []
    for engine_dies in (False, False, True, False):
        if engine_dies:
            engine_processes(pair.rollout.servers[1])["scheduler"].kill()
            assert pair.rollout.revive()
        pair.push_weights(next(versions))
        groups.append(transport._name)
        assert (sampled(pair), pair.weight_digest) == expected
    transport.end()
    first, second = dict.fromkeys(groups)
    assert groups == [first, first, second, second]


class StruckWhile:
    """An engine's client that sends a signal to one of its processes when a call is on its way."""

    def __init__(self, client, server, path, process, number):
        self.client, self.path, self.struck = client, path, False
        self.strike = lambda: engine_processes(server)[process].send_signal(number)

    def __getattr__(self, name):
        return getattr(self.client, name)

    def _call(self, path, call):
        if path == self.path and not self.struck:
            self.struck = True
            striking = threading.Timer(0.003, self.strike)
            striking.start()
        return call()

    def post(self, path, body, num_bytes=0):
        return self._call(path, lambda: self.client.post(path, body, num_bytes))

    def report(self):
        return self._call("/server_info", self.client.report)

    def flush_cache(self):
        return self._call("/flush_cache", self.client.flush_cache)


def strike(pair, monkeypatch, engine, path, process, number=signal.SIGKILL):
    """Arrange that a process of an engine gets a signal during the first call to `path`."""
    group = pair.rollout
    client, server = group.clients[engine], group.servers[engine]
    struck = StruckWhile(client, server, path, process, number)
    clients = [struck if c is client else c for c in group.clients]
    monkeypatch.setattr(group, "clients", clients)
    monkeypatch.setattr(group, "_server_of", dict(zip(clients, group.servers, strict=True)))
    return struck


FAULTS = [
    # way of the weights, engine, call, process
    ("tensor", 1, "/update_weights_from_tensor", "scheduler"),
    ("tensor", 1, "/flush_cache", "guard"),
    ("tensor", 0, "/server_info", "detokenizer"),
    ("disk", 1, "/update_weights_from_disk", "http"),
    ("distributed", 0, "/init_weights_update_group", "http"),
    ("distributed", 1, "/update_weights_from_distributed", "scheduler"),
]


@pytest.mark.parametrize(("way", "engine", "path", "process"), FAULTS)
def test_a_process_that_is_killed_during_a_push_costs_a_restart_and_no_bit(
    pair, expected, monkeypatch, tmp_path, way, engine, path, process
):
    monkeypatch.setattr(pair.trainer, "transport", make_transport(way, tmp_path / "w"))
    with hanging_is_noticed(pair, after=9.0):  # a child may hold a dead one's socket
        struck = strike(pair, monkeypatch, engine, path, process)
        pair.push_weights(next(versions))
    assert struck.struck
    assert (sampled(pair), pair.weight_digest) == expected


def test_an_engine_that_hangs_during_a_push_is_given_up_in_time(
    pair, expected, monkeypatch, caplog
):
    path = "/update_weights_from_tensor"
    frozen = engine_processes(pair.rollout.servers[0])["scheduler"]
    with hanging_is_noticed(pair, after=9.0):
        strike(pair, monkeypatch, 0, path, "scheduler", signal.SIGSTOP)
        pair.push_weights(next(versions))
    assert "failed its health checks for 9 s" in caplog.text
    assert is_gone(frozen)
    assert (sampled(pair), pair.weight_digest) == expected


def test_an_engine_that_hangs_while_it_samples_is_found_by_its_health_checks(
    pair, monkeypatch, caplog
):
    """When the first response comes, others are far from done."""
    requests = [*REQUESTS, *make_requests(24, seed=31, max_new_tokens=100)]
    before = sampled(pair, requests)
    frozen = engine_processes(pair.rollout.servers[0])
    guard = frozen.pop("guard")  # which waits for us, and for nothing in the server

    def freeze(done, tokens):
        pair.on_progress = pair.rollout.on_progress = lambda done, tokens: None
        for process in frozen.values():
            process.send_signal(signal.SIGSTOP)

    monkeypatch.setattr(pair, "on_progress", freeze)
    with hanging_is_noticed(pair, after=9.0):
        assert sampled(pair, requests) == before
    assert "failed its health checks for 9 s" in caplog.text
    assert all(map(is_gone, [guard, *frozen.values()]))


def test_the_push_after_a_broken_one_is_not_the_broken_ones(pair, expected, monkeypatch):
    """A session that stays open, with half of the weights, and no engine that died."""
    for client in pair.rollout.clients:
        client.post("/begin_weight_update", {})
    pair.push_weights(next(versions))
    assert (sampled(pair), pair.weight_digest) == expected


class Breaks(Exception):
    pass


def test_an_error_that_no_engine_died_of_is_raised(pair, monkeypatch):
    def break_down(*_):
        raise Breaks

    monkeypatch.setattr(pair.trainer.transport, "send", break_down)
    with pytest.raises(Breaks):
        pair.push_weights(next(versions))
    monkeypatch.undo()
    pair.push_weights(next(versions))


KILLED_IN_A_PUSH = """
import os, psutil, torch
from onpolicy.rollout.client import EngineClient
from tests.support.processes import command_line, is_guard
post, struck = EngineClient.post, []
def post_and_kill(self, path, body, num_bytes=0):
    is_ours = torch.distributed.get_rank() == {sender}
    if is_ours and path.startswith("/update") and body["weight_version"] == "1" and not struck:
        struck.append(path)
        (run,) = (p for p in psutil.Process().parents() if "run.py train" in command_line(p))
        _, guard = sorted(filter(is_guard, run.children()), key=lambda process: process.pid)
        guard.children()[0].kill()
    return post(self, path, body, num_bytes)
EngineClient.post = post_and_kill
"""


RANKS = [*TWO_RANKS, "--num-rollout", "2", "--cpu-threads", "1"]


@pytest.fixture(scope="module")
def hash_of_one_server(start, tmp_path_factory):
    return run_hash(finish(start(tmp_path_factory.mktemp("plain"), *RANKS)))


@pytest.mark.parametrize(("way", "sender"), [("distributed", 1), ("tensor", 0)])
def test_two_ranks_and_two_servers_push_again_when_one_dies_and_end_with_the_same_hash(
    start, tmp_path, hash_of_one_server, way, sender
):
    """A group for each rank, or shared memory of rank 0's, as the examples for 8 GPUs ask for."""
    argv = [*RANKS, "--weight-sync", way, "--rollout-num-engines", "2"]
    output = finish(start(tmp_path, *argv, in_ranks=KILLED_IN_A_PUSH.format(sender=sender)))
    assert "pushing the weights of version 1 again" in output
    assert run_hash(output) == hash_of_one_server


SMALL_STEPS = ["--dtype", "bfloat16", "--lr", "1e-6", "--weight-sync", "distributed"]


def test_two_ranks_that_push_changes_end_with_the_hash_of_whole_pushes(start, tmp_path):
    whole, sparse = (
        finish(start(tmp_path / name, *RANKS, "--num-rollout", "3", *SMALL_STEPS, *flags))
        for name, flags in (("whole", []), ("sparse", ["--sparse-weight-sync"]))
    )
    assert run_hash(whole) == run_hash(sparse)
    *_, metrics = read_jsonl(tmp_path / "sparse" / "run" / "metrics.jsonl")
    assert 0 < metrics["push/changed_share"] < metrics["push/sent_share"] < 0.6


def test_a_fixed_port_can_be_taken_again_at_once(pair):
    """As --rollout-base-port asks for it, in a run that follows another."""
    stopped = pair.rollout.servers[1]
    stopped.stop()
    with served(stopped.spec, stopped.log_file, stopped.port):
        pass


def test_an_engine_of_someone_else_ends_the_run_at_once_with_its_url_and_the_remedy(pair):
    """The last test: it leaves engines dead."""
    server = pair.rollout.servers[0]
    for_ever = 1e6  # which one that hangs may take
    config = groups.EngineConfig(rollout_server_url=(server.url,), rollout_health_timeout=for_ever)
    theirs = SglangGroup(config, [server.spec], None)
    psutil.Process(engine_processes(server)["http"].pid).kill()
    buckets = pair.trainer.policy.weight_buckets(1 << 20)
    with pytest.raises(EngineError):
        push_weights(buckets, theirs.clients, pair.trainer.transport, next(versions))
    with pytest.raises(EngineError, match=rf"{server.url}.*did not start.*onpolicy serve"):
        theirs.revive()
