"""Several hosts on this one: Ray nodes with an address each (127.0.0.2 and up), in one cluster."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import psutil

from onpolicy.cluster import ray_environment
from onpolicy.cluster.local_ray import SYSTEM, start_node
from onpolicy.system import guard
from tests.support.forked_processes import forked_processes
from tests.support.train_runs import ROOT

READY = "node: "
STORE = 80 << 20


def documented():
    """What docs/clusters.md gives to the head of a cluster as --system-config."""
    text = (ROOT / "docs/clusters.md").read_text()
    return json.loads(re.search(r"--system-config='(\{.*?\})'", text, re.DOTALL)[1])


class Node:
    """A host of a cluster, behind a guard that ends with this process."""

    def __init__(self, *argv):
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def wait_until_it_is_there(self):
        lines = iter(self._process.stdout.readline, "")
        ready = next(line for line in lines if line.startswith(READY))
        self.address, self._raylet = json.loads(ready.removeprefix(READY))
        self._own = set(psutil.Process(self._process.pid).children(recursive=True))

    def processes(self):
        """What was started on it, less what is of Ray."""
        there = psutil.Process(self._process.pid).children(recursive=True)
        return [process for process in there if process not in self._own]

    def kill(self):
        """Kill its raylet. That all the others end, as by a power cut, is for them to see."""
        os.kill(self._raylet, signal.SIGKILL)

    def end(self):
        self._process.stdin.close()
        self._process.wait()


class Raylets:
    """A cluster: the address to join it by, and its nodes."""

    def __init__(self, nodes):
        self.address, self.nodes = nodes[0].address, nodes

    def processes(self):
        return {process for node in self.nodes for process in node.processes()}


@contextlib.contextmanager
def raylets(count, cores=1, gpus=()):
    """A cluster of `count` nodes with `cores` each; this process is to join it at the first one.

    `gpus`: how many each of the first nodes says that it has; there are none.
    """
    says = [*map(str, gpus), *"0" * (count - len(gpus))]
    ray_environment.prepare(local=False)
    os.environ.setdefault(ray_environment.TOKEN, "of-the-tests" * 4)
    nodes = []
    try:
        with forked_processes():
            nodes.append(Node("0", str(cores), says[0]))
            nodes[0].wait_until_it_is_there()
            head = nodes[0].address
            nodes += [Node(str(i), str(cores), says[i], head) for i in range(1, count)]
        for node in nodes[1:]:
            node.wait_until_it_is_there()
        yield Raylets(nodes)
    finally:
        for node in nodes:
            node.end()


def serve(directory, number, cores, gpus, head=None):
    """Start Ray's processes of a node, and wait until the guard ends us."""
    of_the_head = {"session_name": "ray", "_system_config": SYSTEM | documented()}
    node = start_node(
        head=head is None,
        **({"gcs_address": head} if head else of_the_head),
        node_ip_address=f"127.0.0.{int(number) + 2}",
        node_name=f"host{number}",
        num_cpus=int(cores),
        num_gpus=int(gpus),
        object_store_memory=STORE,
        node_manager_port=0,
        temp_dir=str(directory),
    )
    raylet = node.all_processes["raylet"][0].process.pid
    print(READY + json.dumps([node.gcs_address, raylet]), flush=True)
    signal.pause()


if __name__ == "__main__":
    sys.exit(guard.run(lambda directory: serve(directory, *sys.argv[1:])))
