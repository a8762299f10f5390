"""Who is killed in a soak: every kind of process that a run has, and hosts of its cluster."""

import contextlib
import random
import signal
import threading

import psutil

from tests.support.processes import command_line, is_gone, is_guard

VICTIMS = (
    "controller", "rank", "guard", "http", "scheduler", "detokenizer", "raylet", "node", "reward",
    "worker", "gcs_server", "agent",
)  # fmt: skip
"""`reward` is a process that scores, or the one that such processes are forked from. `worker` runs
functions of agents, and its guard is in front of it. `raylet`, `gcs_server` and `agent` are those of a
run's own Ray; `node` is the raylet of a host of a cluster, which ends with it."""

OWN_RAY = ("raylet", "gcs_server", "agent")

SIGNALS = ("KILL", "TERM", "STOP", "PAUSE")
"""What a victim gets. STOP: it is stopped for good; PAUSE: it goes on after PAUSED seconds. A node is
always killed, and a controller, at which nobody looks, goes on."""

PAUSED = 10.0


def victim_of(seed, number):
    """The kind of the kill of this number: all kinds, in an order drawn anew, then all again."""
    lap, place = divmod(number, len(VICTIMS))
    return random.Random(f"{seed}/lap/{lap}").sample(VICTIMS, len(VICTIMS))[place]


def signal_for(victim, draw):
    drawn = draw.choice(SIGNALS)
    if victim == "node":
        return "KILL"
    return "PAUSE" if (victim, drawn) == ("controller", "STOP") else drawn


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
    is_paused = name == "PAUSE"
    process.send_signal(signal.SIGSTOP if is_paused else signal.Signals[f"SIG{name}"])
    if is_paused:
        threading.Timer(PAUSED, _resume, (process,)).start()


def _resume(process):
    with contextlib.suppress(psutil.Error):
        process.resume()


def of_kind(victim, controller, others):
    servers = [p for p in others if is_guard(p)]
    guards = [p for p in servers if p.parent() not in servers]
    if victim == "controller":
        return [controller]
    if victim == "guard":
        return guards
    if victim == "http":
        return [process for guard in guards for process in guard.children()]
    if victim == "rank":
        return [p for p in others if "TrainerRank" in command_line(p)]
    if victim == "reward":
        return [p for p in others if "onpolicy.rewards.scoring_worker" in command_line(p)]
    if victim == "worker":
        return [p for p in others if "onpolicy.agents.worker_process" in command_line(p)]
    own = {"raylet": "raylet", "gcs_server": "gcs_server", "agent": "sh"}
    name = own.get(victim, f"sglang::{victim}")
    return [process for process in others if process.name().startswith(name)]
