"""Servers that die while idle, or hang: started again with the current weights, and the same bits."""

import signal

import psutil
import pytest
from engines_fixture import make_engines, make_requests, running

pytestmark = pytest.mark.engine

REQUESTS = make_requests(48, seed=30, max_new_tokens=60)


@pytest.fixture(scope="module")
def pair(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("restarts")
    with running(make_engines(checkpoint, directory, rollout_health_timeout=9.0)) as engines:
        yield engines


def sampled(pair):
    return [(c.token_ids, c.log_probs, c.weight_version) for c in pair.generate(REQUESTS)]


def test_a_server_that_died_while_idle_is_back_before_the_next_push(pair):
    before = sampled(pair)
    pair.rollout.servers[0]._process.kill()
    pair.rollout.servers[0]._process.wait()
    pair.push_weights("0")
    assert sampled(pair) == before


def test_a_server_that_hangs_is_found_by_its_health_checks(pair, caplog):
    before = sampled(pair)
    tree = psutil.Process(pair.rollout.servers[0]._process.pid)
    frozen = [tree, *tree.children(recursive=True)]

    def freeze(done, tokens):
        pair.on_progress = pair.rollout.on_progress = lambda done, tokens: None
        for process in frozen:
            process.send_signal(signal.SIGSTOP)

    pair.on_progress = freeze
    assert sampled(pair) == before
    assert "failed its health checks for 9 s" in caplog.text
    assert not any(p.is_running() and p.status() != "zombie" for p in frozen)
