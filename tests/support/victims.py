"""Who is killed in a soak: every kind of process that a run has, and hosts of its cluster."""

from __future__ import annotations

import contextlib
import random
import signal
import threading

import psutil

from tests.support.processes import is_gone, is_guard

VICTIMS = (
    "controller", "rank", "guard", "http", "scheduler", "detokenizer", "raylet", "node", "reward",
    "worker", "gcs_server", "agent",
)  # fmt: skip
"""`worker` runs functions of agents, and its guard is in front of it. `raylet`, `gcs_server` and `agent`
are those of a run's own Ray; `node` is the raylet of a host of a cluster, which ends with it."""

OWN_RAY = ("raylet", "gcs_server", "agent")

SIGNALS = ("KILL", "KILL", "TERM", "STOP")
"""What a victim gets; one that is stopped goes on after STOPPED seconds. A node is always killed."""

STOPPED = 10.0


def victim_of(seed, number):
    """The kind of the kill of this number: all kinds, in an order drawn anew, then all again."""
    lap, place = divmod(number, len(VICTIMS))
    return random.Random(f"{seed}/lap/{lap}").sample(VICTIMS, len(VICTIMS))[place]


def kill(victim, which, controller, cluster, name="KILL"):
    """Send one of the kind a signal; whether there was one.

    `controller`: its process id. `cluster`: the `Raylets` that the run has joined, or None.
    """
    if victim == "node":
        cluster.nodes[which % len(cluster.nodes)].kill()
        return True
    try:
        top = psutil.Process(controller)
        others = {*top.children(recursive=True), *(cluster.processes() if cluster else ())}
        others = {process for process in others if not is_gone(process)}  # a zombie has no command
        found = sorted(of_kind(victim, top, others), key=lambda process: process.pid)
        if found:
            _strike(found[which % len(found)], name)
    except psutil.Error:  # one of them has ended meanwhile
        return False
    return bool(found)


def _strike(process, name):
    process.send_signal(signal.Signals[f"SIG{name}"])
    if name == "STOP":
        threading.Timer(STOPPED, _resume, (process,)).start()


def _resume(process):
    with contextlib.suppress(psutil.Error):
        process.resume()


def of_kind(victim, controller, others):
    """The processes of a run that are of this kind."""
    servers = [p for p in others if is_guard(p)]
    guards = [p for p in servers if p.parent() not in servers]
    if victim == "controller":
        return [controller]
    if victim == "guard":
        return guards
    if victim == "http":
        return [process for guard in guards for process in guard.children()]
    if victim == "rank":
        return [p for p in others if "TrainerRank" in " ".join(p.cmdline())]
    if victim == "reward":
        return [p for p in controller.children() if "spawn_main" in " ".join(p.cmdline())]
    if victim == "worker":
        return [p for p in others if "onpolicy.agents.worker_process" in " ".join(p.cmdline())]
    own = {"raylet": "raylet", "gcs_server": "gcs_server", "agent": "sh"}
    name = own.get(victim, f"sglang::{victim}")
    return [process for process in others if process.name().startswith(name)]
