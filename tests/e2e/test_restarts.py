"""Servers that die while idle, or hang: started again with the current weights, and the same bits."""

import signal

import pytest

from onpolicy.rollout.server import EngineServer
from tests.support.engines_fixture import hanging_is_noticed, make_engines, make_requests, running
from tests.support.processes import engine_processes, is_gone
from tests.support.train_runs import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.runs]

REQUESTS = make_requests(8, seed=30, max_new_tokens=8)
REQUESTS += make_requests(24, seed=31, max_new_tokens=100)
"""When the first response comes, others are far from done."""


@pytest.fixture(scope="module")
def pair(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("restarts")
    flags = {"rollout_max_restarts": 1000, "rollout_health_timeout": 300.0}
    with running(make_engines(checkpoint, directory, **flags)) as engines:
        yield engines


def sampled(pair):
    return [
        (c.response_ids, c.rollout_log_probs, c.weight_version) for c in pair.generate(REQUESTS)
    ]


def test_a_server_that_died_while_idle_is_back_before_the_next_push(pair):
    before = sampled(pair)
    engine_processes(pair.rollout.servers[0])["http"].kill()
    wait_for(lambda: not pair.rollout.servers[0].is_running)
    pair.push_weights(0)
    assert sampled(pair) == before


def test_a_server_that_hangs_is_found_by_its_health_checks(pair, caplog):
    before = sampled(pair)
    frozen = engine_processes(pair.rollout.servers[0])
    guard = frozen.pop("guard")  # which waits for us, and for nothing in the server

    def freeze(done, tokens):
        pair.on_progress = pair.rollout.on_progress = lambda done, tokens: None
        for process in frozen.values():
            process.send_signal(signal.SIGSTOP)

    pair.on_progress = freeze
    with hanging_is_noticed(pair, after=9.0):
        assert sampled(pair) == before
    assert "failed its health checks for 9 s" in caplog.text
    assert all(map(is_gone, [guard, *frozen.values()]))


def test_a_fixed_port_can_be_taken_again_at_once(pair):
    """As --rollout-base-port asks for it, in a run that follows another."""
    stopped = pair.rollout.servers[0]
    sampled(pair)
    stopped.stop()
    again = EngineServer(stopped.spec, stopped.port, stopped.log_file)
    try:
        again.start()
        again.wait_until_healthy(300)
    finally:
        again.stop()
