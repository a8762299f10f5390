"""Runs on several hosts: the bits of one, and what becomes of a run when a host or its controller goes.

The hosts are Ray nodes on this machine with an address each (tests/support/raylets.py); servers, ranks
and pushes are real. A free run of all weights: test_async.py.
"""

import re
import signal

import pytest

from tests.support.processes import is_gone, is_guard
from tests.support.raylets import raylets
from tests.support.train_runs import (
    ROLLOUTS,
    finish,
    metrics_of,
    run_hash,
    summary,
    wait_for,
)

pytestmark = [pytest.mark.engine, pytest.mark.runs]


@pytest.fixture(scope="module")
def cluster():
    with raylets(3) as cluster:
        yield cluster


def on(cluster):
    return ["--ray-address", cluster.address, "--rollout-num-engines", "2"]


def saves(directory):
    return ["--save", str(directory / "ckpt"), "--save-interval", "1"]


def guards(processes):
    """Not the servers, which they fork."""
    return [p for p in processes if is_guard(p) and not is_guard(p.parent())]


AHEAD = ("--lora-rank", "8", "--rollout-lag", "1")


@pytest.fixture(scope="module")
def here(start, tmp_path_factory):
    """A run of adapters ahead, of one rank on this host alone: (directory, hash)."""
    directory = tmp_path_factory.mktemp("here")
    return directory, run_hash(finish(start(directory, *AHEAD, *saves(directory))))


def adapters_of(directory):
    return (directory / f"ckpt/step_{ROLLOUTS:06d}/hf/adapter_model.safetensors").read_bytes()


def test_ranks_and_engines_on_several_hosts_give_the_hash_of_one(start, here, cluster, tmp_path):
    spread = ["--actor-num-nodes", "2"]
    output = finish(start(tmp_path, *on(cluster), *AHEAD, *saves(tmp_path), *spread))
    assert run_hash(output) == here[1]
    assert adapters_of(tmp_path) == adapters_of(here[0])
    assert summary(output)["tokens mismatched"] == "0"
    placed = re.findall(r"(host\d) \((127\.0\.0\.\d)\): (.*)", output)
    assert [(host, address) for host, address, _ in placed][:2] != [], output
    engines = [host for host, _, what in placed if "engine" in what]
    assert len(set(engines)) == 2 and engines != ["host0", "host0"], placed
    asked = re.findall(
        r"GiB together, and (host\d) \((127\.0\.0\.\d)\) has [\d.]+ GiB free", output
    )
    assert asked == [(host, address) for host, address, _ in placed]


def test_a_killed_controller_leaves_no_process_on_any_host(start, cluster, tmp_path):
    before = cluster.processes()
    process = start(tmp_path, *on(cluster), "--num-rollout", "1000")
    wait_for(lambda: metrics_of(tmp_path) or process.poll() is not None)
    assert process.poll() is None, process.stdout.read()[-3000:]
    ours = cluster.processes() - before
    assert len(guards(ours)) == 2 and len(ours) >= 2 * 4 + 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: all(map(is_gone, ours)), 60)


def a_host_is_lost(start, directory, cluster, number, *argv, under_way=metrics_of):
    """A run that is under way, as `under_way` tells of its directory, when a host ends."""
    process = start(directory, "--ray-address", cluster.address, *argv)
    wait_for(lambda: under_way(directory) or process.poll() is not None)
    assert process.poll() is None, process.stdout.read()[-3000:]
    there = cluster.nodes[number].processes()
    cluster.nodes[number].kill()
    wait_for(lambda: all(map(is_gone, there)), 60)
    return process


def has_saved(directory):
    return (directory / "ckpt" / "step_000001").exists()


def test_engines_of_a_lost_host_start_elsewhere_and_the_run_goes_on_to_the_same_bits(
    start, here, tmp_path
):
    """They get the base and its adapters: those of the weights before, since they sample ahead."""
    with raylets(3) as cluster:
        argv = ["--rollout-num-engines", "2", *AHEAD]
        output = finish(a_host_is_lost(start, tmp_path, cluster, 1, *argv))
    seen = re.search(
        r"127\.0\.0\.3 has left the cluster \(known after .* s\); its server starts on \S+", output
    )
    assert seen, output[-3000:]
    assert "the run begins" not in output
    assert run_hash(output) == here[1]
    assert summary(output)["tokens mismatched"] == "0"


def test_a_lost_host_with_a_rank_ends_the_run_in_seconds_and_in_plain_words(start, tmp_path):
    with raylets(2) as cluster:
        argv = ["--num-rollout", "1000", "--actor-num-nodes", "2", "--rollout-num-engines", "2"]
        output = finish(a_host_is_lost(start, tmp_path, cluster, 1, *argv), code=1)
    assert re.search(r"(HostLost|TrainerLost)Error: .*--load.*--max-rank-restarts", output)
    assert "Traceback" not in output


def test_without_a_node_of_its_own_a_run_ends_and_waits_for_no_placement(start, tmp_path):
    """Ray would start nothing for it, on whatever hosts are left."""
    with raylets(2) as cluster:
        argv = ["--num-rollout", "1000", *saves(tmp_path), "--max-rank-restarts", "1"]
        output = finish(a_host_is_lost(start, tmp_path, cluster, 0, *argv), code=1)
    assert re.search(r"EngineError: this host's node has left the Ray cluster.*--load", output)
    assert "Traceback" not in output


def test_a_run_that_loses_a_host_with_a_rank_goes_on_without_it_to_the_same_bits(
    start, here, tmp_path
):
    with raylets(3) as cluster:
        argv = [*AHEAD, *saves(tmp_path), "--max-rank-restarts", "1", "--actor-num-nodes", "2"]
        output = finish(a_host_is_lost(start, tmp_path, cluster, 1, *argv, under_way=has_saved))
    assert "the run begins from the last checkpoint" in output
    assert run_hash(output) == here[1]
    assert adapters_of(tmp_path) == adapters_of(here[0])
