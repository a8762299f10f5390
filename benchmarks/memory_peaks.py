"""Peak memory of every process that a command starts.

    python -m benchmarks.memory_peaks OUT.json onpolicy verify --hf-checkpoint DIR ...

A peak is Linux's VmHWM: resident pages of the process, shared ones included.
`together` is the largest sum of proportional sizes (Pss) that was seen, where a shared page counts once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

SECONDS = 2.0
MIB = 1 << 20


def kib(pid: int, file: str, key: str) -> int:
    """Return a number from /proc; 0 if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), 0)


def label(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
        return " ".join(Path(word).name if word.startswith("/") else word for word in words)[
            :90
        ].strip()
    except psutil.Error:
        return ""


def watch(command: list[str]) -> dict[str, object]:
    started = time.monotonic()
    child = subprocess.Popen(command)
    top = psutil.Process(child.pid)
    peaks: dict[int, tuple[str, int]] = {}
    together = 0
    while child.poll() is None:
        try:
            processes = [top, *top.children(recursive=True)]
        except psutil.Error:
            continue
        for process in processes:
            peak = kib(process.pid, "status", "VmHWM")
            name = peaks.get(process.pid, ("", 0))[0]
            peaks[process.pid] = (
                label(process) or name,
                max(peak, peaks.get(process.pid, ("", 0))[1]),
            )
        together = max(together, sum(kib(p.pid, "smaps_rollup", "Pss") for p in processes))
        time.sleep(SECONDS)
    rows = sorted(peaks.values(), key=lambda row: -row[1])
    return {
        "command": " ".join(command),
        "exit_code": child.returncode,
        "seconds": round(time.monotonic() - started),
        "together_mib": together * 1024 // MIB,
        "processes": [
            {"process": n, "peak_mib": p * 1024 // MIB} for n, p in rows if p > 100 << 10
        ],
    }


if __name__ == "__main__":
    result = watch(sys.argv[2:])
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    sys.exit(int(str(result["exit_code"])))
