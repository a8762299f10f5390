"""A run's own servers of a classifier on the hosts of its cluster, and when one of those is lost.

The hosts are Ray nodes on this machine with an address each (tests/support/raylets.py).
"""

import re

import pytest

from tests.support.classifiers import make_classifier
from tests.support.processes import is_gone
from tests.support.raylets import raylets
from tests.support.train_runs import finish, metrics_of, run_hash, summary, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.runs]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The flags by which a run starts servers of a classifier."""
    checkpoint = make_classifier(tmp_path_factory.mktemp("classifier"))
    return (
        "--custom-rm-path", "", "--rm-type", "model", "--reward-checkpoint", str(checkpoint),
        "--reward-input", "text",
    )  # fmt: skip


@pytest.fixture(scope="module")
def here(start, model, tmp_path_factory):
    """The hash of a run whose one classifier is on this host."""
    return run_hash(finish(start(tmp_path_factory.mktemp("here"), *model)))


def test_classifiers_on_several_hosts_and_on_others_when_one_is_lost_give_the_bits_of_one(
    start, model, here, tmp_path
):
    with raylets(3) as cluster:
        process = start(
            tmp_path, *model, "--ray-address", cluster.address, "--reward-num-engines", "2"
        )
        wait_for(lambda: metrics_of(tmp_path) or process.poll() is not None)
        assert process.poll() is None, process.stdout.read()[-3000:]
        there = cluster.nodes[1].processes()
        cluster.nodes[1].kill()
        wait_for(lambda: all(map(is_gone, there)), 60)
        output = finish(process)
    placed = re.findall(r"(host\d) \(127\.0\.0\.\d\): .*reward engine (\d) ", output)
    assert placed == [("host0", "0"), ("host1", "1")]
    moved = re.findall(r"127\.0\.0\.3 has left the cluster .*; its server starts on (\S+)", output)
    assert len(moved) == 2, "the rollout's and the classifier's"
    assert run_hash(output) == here
    assert summary(output)["tokens mismatched"] == "0"
    assert "the run begins" not in output
