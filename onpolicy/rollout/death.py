"""Diagnosis of an engine that died at its start, from its exit code and its log: a cause and a
remedy.

SGLang's first process kills itself and all others when one of them fails, so its exit code is
SIGKILL's in any case. The cause stands in the log, most of the time far above its end.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

VMSTAT = Path("/proc/vmstat")

_ENDED_ITSELF = "kill_process_tree called"

_OUT_OF_MEMORY = (
    r"(?P<what>MemoryError\b.*|DefaultCPUAllocator: .*|OutOfMemoryError: .*|CUDA out of memory.*)"
)
_LESS_MEMORY = (
    "Give --sglang-max-total-tokens for a smaller cache, --sglang-mem-fraction-static on a GPU, a "
    "smaller model, or free some memory."
)

CAUSES = (
    (r"onpolicy\.errors\.\w+: (?P<what>.*)", "{what}", ""),
    (_OUT_OF_MEMORY, "it ran out of memory ({what}).", _LESS_MEMORY),
    (
        r"(?P<what>(?:ModuleNotFoundError|ImportError): .*)",
        "an import failed in {where} ({what}).",
        "Install what is missing in the environment that runs this: `make setup` on a CPU, "
        "`pip install -e '.[gpu]'` on a GPU.",
    ),
    (
        r"(?P<what>OSError: \[Errno 98\].*|.*[Aa]ddress already in use.*)",
        "its port was taken ({what}).",
        "Give another --rollout-base-port, or leave it out for a free one.",
    ),
    (
        r"^(?:.*\] )?(?P<what>(?:\w+\.)*\w+(?:Error|Exception)\b: .*)",
        "{what} in {where}.",
        "If that is one of onpolicy's files, it is a fault of ours; if one of SGLang's, of a flag or a "
        "checkpoint that it cannot take. The log has the traceback.",
    ),
)
"""(pattern, cause, remedy): tried in this order, on the first line of the log that matches."""

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def cause_of_death(exit_code: int | None, log: str, oom_kills: int = 0) -> str:
    """Return what the engine died of, and what to try.

    exit_code: the guard's, which repeats its server's, 128 + n after signal n; -n if the guard
    itself was ended. oom_kills: processes that the kernel has killed for lack of memory meanwhile.
    """
    if oom_kills:
        return (
            f"the kernel ended {oom_kills} processes of this host for want of memory meanwhile "
            f"(oom_kill in {VMSTAT}), this engine most likely. {_LESS_MEMORY}"
        )
    if _ENDED_ITSELF in log or exit_code in (None, 1, 2):
        for pattern, says, remedy in CAUSES:
            if match := re.search(pattern, log, re.MULTILINE):
                what = says.format(what=match["what"].strip(), where=_where(log[: match.start()]))
                return f"{what} {remedy}".strip()
    return _of_signal(exit_code)


def _of_signal(exit_code: int | None) -> str:
    if exit_code == 0:
        return (
            "it was asked to end (SIGTERM to its guard), by somebody or by a scheduler of jobs. Start "
            "it again, and ask who ends processes on this host."
        )
    code = exit_code or 0
    try:
        name = signal.Signals(-code if code < 0 else code - 128).name
    except ValueError:
        return f"it ended with exit code {exit_code}, and its log names no error. Read the log."
    whose = "its guard was" if code < 0 else "it was"
    who = "a process of this host, not its guard and not the kernel's OOM killer, sent it"
    crashed = "it crashed; the log's last lines say where, if anything does"
    sent = who if name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP") else crashed
    return f"{whose} ended by {name}: {sent}. Start it again; if it comes again, read its log."


def _where(log: str) -> str:
    """Return the file and function of the innermost frame of the last traceback in `log`."""
    frames = list(_FRAME.finditer(log))
    if not frames:
        return "its start"
    frame = frames[-1]
    return f"{frame['function']} of {frame['file']}, line {frame['line']}"


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory; 0 where it does not say."""
    try:
        match = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0
