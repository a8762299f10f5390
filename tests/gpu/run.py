"""Runner of the GPU suite, one process for each file: `python -m tests.gpu.run --json FILE
[arguments]`.

An illegal memory access poisons the process that made it, and every test after it. So a file that
dies does not affect the others: it is recorded as crashed, with the test that it died in. It needs
only the suite's own requirements, and none of pytest's plug-ins.
"""

import argparse
import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.gpu.summary import record_of
from tests.support.gpu.machine import write_json

FILES = (
    "test_libraries", "test_gemm", "test_fp8", "test_rows", "test_attention", "test_delta_rule",
    "test_end_to_end", "test_tensor_parallel", "test_negative_controls", "test_server",
)  # fmt: skip
"""The files from the parts to the whole, so that the first failure is the smallest one."""

ALONE = "test_server"
"""A file that measures free GPU memory, so it runs after the others have ended."""

PYTEST = (sys.executable, "-m", "pytest", "-v", "--confcutdir=tests/gpu")
"""-v: the end of a log names the test that its process died in."""

NO_TESTS = 5
"""pytest's exit status where -k chose none of a file."""

SHOWN = 8
"""The most failures on the page; the JSON has all."""


def main(argv):
    """Run every file, merge the records, and print what to send back; return 1 if anything failed."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--json", type=Path, required=True, help="what all files recorded")
    parser.add_argument("--jobs", type=int, default=1, help="files side by side on the GPU")
    parser.add_argument("--files", nargs="+", choices=FILES, default=FILES, help="these alone")
    own, arguments = parser.parse_known_args(argv)
    folder = own.json.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    tests = {}
    run = partial(_run, folder=folder, arguments=arguments, shown=own.jobs == 1)
    with ThreadPoolExecutor(own.jobs) as pool:
        beside = pool.map(run, [name for name in own.files if name != ALONE])
        last = [name for name in own.files if name == ALONE]
        for found in itertools.chain(beside, map(run, last)):
            tests |= found
            if tests:
                write_json(own.json, record_of(tests))
    if tests:
        page = page_of(json.loads(own.json.read_text()), own.json)
        own.json.with_suffix(".md").write_text(page)
        print(page)
    return int(any(test["outcome"] not in ("passed", "skipped") for test in tests.values()))


def _run(name, folder, arguments, shown):
    part, log = folder / f"{name}.json", folder / f"{name}.log"
    part.unlink(missing_ok=True)
    process = subprocess.Popen(
        [*PYTEST, f"tests/gpu/{name}.py", "--gpu-json", str(part), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    with open(log, "w") as copy:
        for line in process.stdout:
            if shown:
                print(line, end="", flush=True)
            copy.write(line)
            copy.flush()
    status = process.wait()
    print(f"{name}: exit status {status}", flush=True)
    tests = json.loads(part.read_text())["tests"] if part.exists() else {}
    if status not in (0, 1, NO_TESTS):
        tests[f"tests/gpu/{name}.py"] = {
            "outcome": "crashed",
            "seconds": 0.0,
            "reason": f"its process ended with status {status}; the end of {log.name} says where",
        }
    return tests


def page_of(record, file):
    """Return the findings, and what to send back, as a page to read."""
    tests = record["tests"]
    bad = {n: t for n, t in tests.items() if t["outcome"] not in ("passed", "skipped")}
    skipped = sorted({t.get("reason", "") for t in tests.values() if t["outcome"] == "skipped"})
    lines = [
        "# The GPU suite on this machine",
        "",
        ", ".join(f"{name} {value}" for name, value in record["machine"].items()),
        "",
        f"Tests: {', '.join(f'{n} {outcome}' for outcome, n in record['outcomes'].items())}. "
        f"Compared: {record['compared_cases']} cases, {record['compared_values']} values.",
        "",
        *(["## What failed, in the order in which it ran", ""] if bad else []),
        *(f"- `{name}`: {test.get('reason', '')}" for name, test in list(bad.items())[:SHOWN]),
        *([f"- and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []),
        *(["", "## What was not run, and why", ""] if skipped else []),
        *(f"- {reason}" for reason in skipped),
        "",
        "## What to send back",
        "",
        f"- `{file}`: every test, what it compared, how long it took, and why it failed or was skipped",
        f"- the folder `{file.with_suffix('')}`: what each file printed, the tiles that DeepGEMM chose "
        "among it",
        "- `nvidia-smi` and `pip list`",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
