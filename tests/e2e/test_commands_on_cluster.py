"""Commands besides `onpolicy train` on several hosts: `serve`, `bench rollout`, `verify`, `explain`.

The hosts are Ray nodes on this machine with an address each (tests/support/raylets.py).
"""

import json
import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.processes import is_gone
from tests.support.raylets import raylets
from tests.support.serving import reached_by
from tests.support.train_runs import finish, run_hash, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.runs]

HOSTS = {"127.0.0.2", "127.0.0.3"}


@pytest.fixture(scope="module")
def cluster():
    with raylets(2) as cluster:
        yield cluster


def onpolicy(*argv):
    command = [sys.executable, "-m", "onpolicy.cli", *map(str, argv)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )


def test_served_engines_of_all_hosts_sample_for_a_run_and_end_with_their_command(
    start, checkpoint, cluster, tmp_path
):
    before = cluster.processes()
    serve = onpolicy(
        "serve", "--hf-checkpoint", checkpoint, "--run-dir", tmp_path / "serve",
        "--ray-address", cluster.address, "--rollout-num-engines", "2",
    )  # fmt: skip
    try:
        flags, _ = reached_by(serve)
        assert set(re.findall(r"http://([\d.]+):\d+", " ".join(flags))) == HOSTS
        served = finish(start(tmp_path / "served", *flags))
        ours = [
            *(cluster.processes() - before),
            *psutil.Process(serve.pid).children(recursive=True),
        ]
        assert len(ours) >= 2 * 4
    finally:
        serve.send_signal(signal.SIGKILL)
        serve.wait()
    wait_for(lambda: all(map(is_gone, ours)), 60)
    assert run_hash(served) == run_hash(finish(start(tmp_path / "own")))


def test_servers_of_all_hosts_are_measured(checkpoint, cluster, tmp_path):
    file = tmp_path / "rollout.json"
    finish(
        onpolicy(
            "bench", "rollout", "--hf-checkpoint", checkpoint, "--num-prompts", "4",
            "--prompt-len", "8", "--max-new-tokens", "8", "--repetitions", "1", "--json", file,
            "--run-dir", tmp_path, "--ray-address", cluster.address, "--rollout-num-engines", "2",
        )
    )  # fmt: skip
    result = json.loads(file.read_text())
    assert result["ratio"] > 0 and result["rollout_num_engines"] == 2
    for kind in ("aligned", "stock"):
        logs = [(tmp_path / kind / f"engine_{i}.log").read_text() for i in range(2)]
        assert {re.search(r"running on http://([\d.]+):", log)[1] for log in logs} == HOSTS


def test_a_host_with_gpus_is_refused_where_the_contract_is_for_cpus(checkpoint, tmp_path):
    """It says that it has two; the command is on a host that shows none to PyTorch."""
    with raylets(2, gpus=(0, 2)) as cluster:
        output = finish(
            onpolicy(
                "verify", "--hf-checkpoint", checkpoint, "--run-dir", tmp_path / "run",
                "--ray-address", cluster.address, "--rollout-num-engines", "2",
            ),
            code=1,
        )  # fmt: skip
    assert re.search(
        r"ContractError: host1 \(127\.0\.0\.3\): .* has num_gpus=2, and this host", output
    )


def test_engines_and_ranks_of_all_hosts_are_explained(checkpoint, cluster, tmp_path):
    file = tmp_path / "result.json"
    output = finish(
        onpolicy(
            "explain", "--hf-checkpoint", checkpoint, "--num-prompts", "8", "--max-new-tokens", "8",
            "--json", file, "--run-dir", tmp_path / "run", "--ray-address", cluster.address,
            "--rollout-num-engines", "2", "--actor-num-nodes", "2",
        )
    )  # fmt: skip
    placed = re.findall(r"host\d \([\d.]+\): trainer rank \d .*; engine \d", output)
    assert len(placed) == 2, output
    result = json.loads(file.read_text())
    assert (result["num_mismatched_tokens"], result["num_compared_tokens"]) == (0, 64)
    assert result["source"] is None and result["only_in_one"] == []
    # Every token of the prompts was computed on either side, wherever.
    assert len({site["rows"] for site in result["sites"] if site["site"][0] != "lm_head"}) == 1
