"""Runs on several hosts: the bits of one, and what becomes of a run when a host or its controller goes.

The hosts are Ray nodes on this machine with an address each (tests/support/raylets.py); servers, ranks
and pushes are real.
"""

import re
import signal

import psutil
import pytest

from tests.support.processes import is_gone, is_guard
from tests.support.raylets import raylets
from tests.support.train_runs import (
    TWO_RANKS,
    exported_weights,
    finish,
    metrics_of,
    run_hash,
    summary,
    wait_for,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def cluster():
    with raylets(3) as cluster:
        yield cluster


def on(cluster):
    return ["--ray-address", cluster.address, "--rollout-num-engines", "2"]


def saves(directory):
    return ["--save", str(directory / "ckpt"), "--save-interval", "1"]


def below(pid):
    return psutil.Process(pid).children(recursive=True)


def guards_below(pid):
    """Not the servers, which they fork."""
    return [p for p in below(pid) if is_guard(p) and not is_guard(p.parent())]


@pytest.mark.parametrize("ranks", [(), TWO_RANKS], ids=["1 rank", "2 ranks"])
def test_engines_on_other_hosts_give_the_hash_of_one_host(start, cluster, tmp_path, ranks):
    here = tmp_path / "here"
    expected = finish(start(here, *saves(here), *ranks))
    spread = ["--actor-num-nodes", "2"] if ranks else []
    output = finish(start(tmp_path, *on(cluster), *saves(tmp_path), *spread))
    assert run_hash(output) == run_hash(expected)
    assert exported_weights(tmp_path / "ckpt") == exported_weights(here / "ckpt")
    assert summary(output)["tokens mismatched"] == "0"
    placed = re.findall(r"(host\d) \((127\.0\.0\.\d)\): (.*)", output)
    assert [(host, address) for host, address, _ in placed][:2] != [], output
    engines = [host for host, _, what in placed if "engine" in what]
    assert len(set(engines)) == 2 and engines != ["host0", "host0"], placed


def test_a_killed_controller_leaves_no_process_on_any_host(start, cluster, tmp_path):
    before = {process.pid for pid in cluster.pids for process in below(pid)}
    process = start(tmp_path, *on(cluster), "--num-rollout", "1000")
    wait_for(lambda: metrics_of(tmp_path) or process.poll() is not None)
    assert process.poll() is None, process.stdout.read()[-3000:]
    engines = [guard for pid in cluster.pids for guard in guards_below(pid)]
    ours = [p for pid in cluster.pids for p in below(pid) if p.pid not in before]
    assert len(engines) == 2 and len(ours) >= 2 * 4 + 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: all(map(is_gone, ours)), 60)


def test_a_lost_host_ends_the_run_in_seconds_and_in_plain_words(start, tmp_path):
    with raylets(2) as cluster:
        process = start(tmp_path, "--ray-address", cluster.address, "--num-rollout", "1000")
        wait_for(lambda: metrics_of(tmp_path) or process.poll() is not None)
        assert process.poll() is None, process.stdout.read()[-3000:]
        (guard,) = guards_below(cluster.pids[1])
        cluster.kill(1)
        wait_for(lambda: is_gone(guard), 30)
        output = finish(process, code=1)
    assert "EngineError" in output and "Traceback" not in output
