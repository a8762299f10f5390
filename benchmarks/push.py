"""Cost of a push to a real server, by its way; beside another commit's, if one is named.

    python -m benchmarks.push --hf-checkpoint DIR --json OUT.json [--ways tensor,disk] [--before COMMIT]
        [--ranks 2 --engines 2]

Both send the same tensors, in turns, each from processes of its own to servers of its own, which verify
every push. With several ranks each sends to servers of its own, beside rank 0 to all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from onpolicy.bench.turns import take_turns
from tests.support.gpu.machine import describe_machine, write_json

ROOT = Path(__file__).parents[1]


class Pusher:
    """A process with a server, to which it pushes on command, by the code under `root`."""

    def __init__(self, root: Path, settings: dict[str, Any]):
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "push_worker.py")],
            env={**os.environ, "PYTHONPATH": str(root)}, cwd=root,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._versions = 0
        self._tell(settings)

    def _tell(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def push(self, way: str, bucket_mib: int, *, by_rank_0: bool = False) -> dict[str, Any]:
        """Return seconds and CPU seconds of the pusher, or of its rank 0. Raises RuntimeError if it
        failed."""
        self._versions += 1
        asked = {"way": way, "bucket_mib": bucket_mib, "by_rank_0": by_rank_0}
        self._tell(asked | {"version": self._versions})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"way={way}: the push failed; the reason stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def pushers(args: argparse.Namespace, settings: dict[str, Any]) -> Iterator[dict[str, Pusher]]:
    """Yield processes that push by this code, and by the named commit's code."""
    with ExitStack() as on_exit:
        roots = {"now": ROOT}
        if args.before:
            before = Path(on_exit.enter_context(tempfile.TemporaryDirectory()))
            archive = subprocess.run(
                ["git", "archive", args.before], cwd=ROOT, check=True, capture_output=True
            )
            subprocess.run(["tar", "-x", "-C", before], input=archive.stdout, check=True)
            roots["before"] = before
        found = {}
        for kind, root in roots.items():
            directory = str(Path(settings["directory"]) / kind)
            found[kind] = Pusher(root, {**settings, "directory": directory})
            on_exit.callback(found[kind].close)
        yield found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each way and bucket size; return medians, and the ratios of neighbours."""
    directory = args.json.with_suffix("").absolute()
    settings = {
        "checkpoint": str(Path(args.hf_checkpoint).absolute()), "directory": str(directory),
        "ranks": args.ranks, "engines": args.engines,
    }  # fmt: skip
    cells = []
    with pushers(args, settings) as kinds:
        for way in args.ways.split(","):
            for mib in args.bucket_mib:
                of = {kind: partial(pusher.push, way, mib) for kind, pusher in kinds.items()}
                if args.ranks > 1:
                    of["rank 0"] = partial(of["now"], by_rank_0=True)
                runs = take_turns(of, 1, args.repetitions)
                cells.append({"way": way, "bucket_mib": mib, **_compared(runs)})
                print(json.dumps(cells[-1]), file=sys.stderr)
    return cells


def _compared(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    sent = ("tensors", "bytes", "digest")
    (same,) = {tuple(run[name] for name in sent) for of_kind in runs.values() for run in of_kind}
    compared: dict[str, Any] = dict(zip(sent, same, strict=True))
    for kind, of_kind in runs.items():
        compared[kind] = {
            name: median(run[name] for run in of_kind) for name in ("seconds", "cpu_seconds")
        } | {"runs": [run["seconds"] for run in of_kind]}
    for other in runs.keys() - {"now"}:
        pairs = zip(runs[other], runs["now"], strict=True)
        ratio = median(b["seconds"] / n["seconds"] for b, n in pairs)
        compared[f"times_as_fast_as_{other.replace(' ', '_')}"] = ratio
    return compared


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--json", type=Path, required=True)
    ways = "auto,tensor" if torch.cuda.is_available() else "tensor,distributed"
    parser.add_argument("--ways", default=ways, help="commas between")
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[512])
    parser.add_argument("--before", default="", help="a commit")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args(argv)
    machine = describe_machine() | {"cores": len(os.sched_getaffinity(0))}
    write_json(args.json, {"machine": machine, "before": args.before, "pushes": measure(args)})


if __name__ == "__main__":
    main()
