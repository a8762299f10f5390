"""Processes that tests start, and those of an engine: who they are, and that they end with us."""

import ctypes
import os
import signal

import psutil

_SET_DEATH_SIGNAL = 1  # linux/prctl.h


def end_with_parent():
    """Let Linux kill this process when the one that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def engine_processes(server):
    """The processes of an `EngineServer` by what they do: guard, http, scheduler_TP1, ..."""
    guard = psutil.Process(server._process.pid)
    (http,) = guard.children()
    found = {"guard": guard, "http": http}
    for child in http.children():
        name = child.name().removeprefix("sglang::")
        found["tracker" if name.startswith("python") else name] = child
    return found


def command_line(process):
    """Returns the words of its command; none if it has ended, whether it has been waited for or not."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def variables(process):
    """Returns the environment that it was started with; none if it has ended."""
    try:
        return process.environ()
    except psutil.Error:
        return {}


def is_guard(process):
    """Whether it is what a run starts for a server; where it was forked, its command is one word."""
    return "sglang_patches.server_process" in command_line(process)


def trainer_ranks(pid):
    """The processes of a run's trainer."""
    descendants = psutil.Process(pid).children(recursive=True)
    return [process for process in descendants if "TrainerRank" in command_line(process)]


def is_gone(process):
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return True


def listening_addresses(processes):
    """The addresses at which processes wait for connections over IP."""
    return {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or connection.type.name == "SOCK_DGRAM"
    }
