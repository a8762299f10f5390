"""A quarter of an hour on a GPU: every open question in order of its worth, in two calls.

    make gpu-quarter                                  the first call: speed
    make gpu-quarter GPU_QUARTER_ARGS='--call 2'      the second: bits, engines, trained weights

Each item is a command with a time limit of its own. A result is a line of JSON in the record,
written as soon as it is there, and another line says how each item ended, so a call that is cut
loses only what it had not measured. The page beside the record is written anew after every item.
`--rehearse` runs the same code on a CPU, small, and says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_quarter.quarter_items import Item, items
from benchmarks.gpu_quarter.quarter_page import page
from benchmarks.gpu_quarter.result_lines import Line, lines_of, read_lines

ROOT = Path(__file__).parents[2]
REHEARSAL = 3600.0
"""Seconds of a rehearsal and of each of its items: it measures no time."""
MODELS = ROOT / "runs" / "gpu_quarter"
"""The folder of checkpoints, which are too large for what is sent back."""
GRACE = 5.0
"""Seconds that an item out of time has to end what it started."""
LAST_BYTES = 1500
"""Bytes kept of a failed item's log."""

Write = Callable[[Line], None]


class Running:
    """An item under way, in a process group of its own, with its output in a file.

    A file has no other end to wait for: grandchildren that stay behind hold nobody up.
    """

    def __init__(self, item: Item, folder: Path, write: Write, seconds: float):
        self.item, self.write, self.limit = item, write, seconds
        self.output, self.log = (folder / f"{item.name}.{end}" for end in ("jsonl", "log"))
        self.read = 0
        self.started = time.monotonic()
        if item.record:
            item.record.unlink(missing_ok=True)  # an earlier call's
        with open(self.output, "w") as output, open(self.log, "w") as log:
            self.process = subprocess.Popen(
                item.command, stdout=output, stderr=log, cwd=ROOT, start_new_session=True
            )
        write({"item": item.name, "started": self.process.pid, "limit_s": round(seconds)})

    def is_done(self) -> bool:
        """Pass on what is new, and end the item if it is out of time; return whether it has
        ended."""
        code = self.process.poll()
        self._pass_on()
        is_late = time.monotonic() > self.started + self.limit
        if code is None and not is_late:
            return False
        outcome = "out of time" if code is None else "failed" if code else "ended"
        self.stop()
        self._pass_on()
        line: Line = {"item": self.item.name, "outcome": outcome}
        line["seconds"] = round(time.monotonic() - self.started, 1)
        if self.item.record and self.item.record.exists():
            with suppress(ValueError):  # cut while it was written
                line["record"] = json.loads(self.item.record.read_text())
        if outcome != "ended":
            line["exit_code"] = code
            line["log"] = self.log.read_bytes()[-LAST_BYTES:].decode(errors="replace")
        self.write(line)
        return True

    def _pass_on(self) -> None:
        with open(self.output, "rb") as output:
            output.seek(self.read)
            written = output.read()
        whole = written[: written.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in lines_of(whole.decode(errors="replace")):
            self.write({"item": self.item.name, **line})

    def stop(self) -> None:
        """End the process group: politely, so that servers are ended by who started them, then not."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + GRACE
            is_there = self._signal(sent)
            while is_there and time.monotonic() < end:
                time.sleep(0.05)
                self.process.poll()
                is_there = self._signal(0)
        self.process.wait()

    def _signal(self, number: int) -> bool:
        """Send a signal to the group; return whether anyone is left in it."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True


def run(chosen: Sequence[Item], folder: Path, write: Write, seconds: float) -> bool:
    """Run items one after another, those in the background beside them; return whether all ended
    well. None begins when less than GRACE is left of the call's `seconds`."""
    end = time.monotonic() + seconds
    outcomes: list[str] = []

    def noting(line: Line) -> None:
        outcomes.extend([line["outcome"]] if "outcome" in line else [])
        write(line)

    beside: dict[str, Running] = {}
    running: list[Running] = []

    def wait_for(awaited: Running) -> None:
        while awaited in running:
            running[:] = [each for each in running if not each.is_done()]
            time.sleep(0.05)

    try:
        for item in chosen:
            if item.after in beside:
                wait_for(beside[item.after])
            left = end - time.monotonic()
            if left < GRACE:
                noting({"item": item.name, "outcome": "not begun", "seconds": 0})
                continue
            running.append(Running(item, folder, noting, min(item.seconds, left)))
            if item.is_beside:
                beside[item.name] = running[-1]
            else:
                wait_for(running[-1])
        for each in beside.values():
            wait_for(each)
    finally:  # an exception, SIGTERM among them
        for each in running:
            each.stop()
    return set(outcomes) <= {"ended"}


def _writer(record: Path, about: Line) -> Write:
    """Return a function that appends to the record, and rewrites the page when an item has ended."""

    def write(line: Line) -> None:
        text = json.dumps({**about, "at": round(time.time(), 1), **line})
        with open(record, "a") as file:
            file.write(text + "\n")
        print(text[:300], flush=True)
        if "outcome" in line:
            try:
                text = page(read_lines(record))
            except Exception as error:  # no page is worth the items that are still to come
                text = f"{record} cannot be shown: {error!r}\n"
            record.with_suffix(".md").write_text(text)

    return write


def _end(signum: int, frame: Any) -> None:
    sys.exit(128 + signum)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if an item failed, was cut, or was not begun."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--call", type=int, choices=(1, 2), default=1)
    parser.add_argument("--only", nargs="+", metavar="ITEM", help="these alone, by name")
    parser.add_argument("--seconds", type=float, default=420, help="of the call")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, small")
    parser.add_argument(
        "--record", type=Path, default=Path("benchmarks/results/gpu_quarter.jsonl")
    )  # fmt: skip
    args = parser.parse_args(argv)
    folder = args.record.absolute().with_suffix("")
    chosen = items(args.call, folder, folder if args.rehearse else MODELS, args.rehearse)
    if unknown := {*(args.only or ())} - {item.name for item in chosen}:
        names = ", ".join(item.name for item in chosen)
        parser.error(f"--only={', '.join(sorted(unknown))}: call {args.call} has {names}.")
    chosen = [item for item in chosen if not args.only or item.name in args.only]
    if args.rehearse:
        args.seconds, chosen = REHEARSAL, [replace(item, seconds=REHEARSAL) for item in chosen]
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _end)
    about = {"call": args.call, **({"rehearsal": True} if args.rehearse else {})}
    return 0 if run(chosen, folder, _writer(args.record, about), args.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
