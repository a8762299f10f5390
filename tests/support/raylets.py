"""Several hosts on this one: Ray nodes with an address each (127.0.0.2 and up), in one cluster."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

from onpolicy.cluster import environment
from onpolicy.cluster.local_ray import SYSTEM
from onpolicy.system import guard
from tests.support.train_runs import ROOT

READY = "cluster: "
STORE = 80 << 20


def documented():
    """What docs/clusters.md gives to the head of a cluster as --system-config."""
    text = (ROOT / "docs/clusters.md").read_text()
    return json.loads(re.search(r"--system-config='(\{.*?\})'", text, re.DOTALL)[1])


class Raylets:
    """A cluster: its address, and the process ids of its nodes."""

    def __init__(self, address, pids):
        self.address, self.pids = address, pids

    def kill(self, number):
        """End a node as a power cut would: its raylet, and all that is below it."""
        os.kill(self.pids[number], signal.SIGKILL)


@contextlib.contextmanager
def raylets(count, cores=1):
    """A cluster of `count` nodes with `cores` each; this process is to join it at the first one."""
    environment.prepare(local=False)
    os.environ.setdefault(environment.TOKEN, "of-the-tests" * 4)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(count), str(cores)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        lines = iter(process.stdout.readline, "")
        ready = next(line for line in lines if line.startswith(READY))
        yield Raylets(**json.loads(ready.removeprefix(READY)))
    finally:
        process.stdin.close()
        process.wait()


def serve(count, cores, directory):
    os.environ["RAY_TMPDIR"] = str(directory)  # where Cluster leaves its address
    from ray.cluster_utils import Cluster

    def node(number):
        return {
            "node_ip_address": f"127.0.0.{number + 2}",
            "node_name": f"host{number}",
            "num_cpus": cores,
            "num_gpus": 0,
            "object_store_memory": STORE,
            "include_dashboard": False,
            "include_log_monitor": False,
            "no_monitor": True,
            "temp_dir": str(directory),
        }

    head = {**node(0), "session_name": "ray", "_system_config": SYSTEM | documented()}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    nodes = [cluster.head_node, *(cluster.add_node(**node(i)) for i in range(1, count))]
    pids = [n.all_processes["raylet"][0].process.pid for n in nodes]
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # no zombies: workers look for their raylet's number
    print(READY + json.dumps({"address": cluster.address, "pids": pids}), flush=True)
    while True:
        time.sleep(1000)


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(guard.run(lambda directory: serve(*given, directory)))
