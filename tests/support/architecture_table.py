"""The table of architectures: `onpolicy verify` on a tiny random checkpoint of each, written down.

Run by hand (`make architectures`). Every cell is a command of its own on real engines, with a step and
a push, and is written down as soon as it has ended; a second call goes on with the cells that are
missing. The page in docs/ is rendered from what is written down.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from onpolicy.errors import ConfigError
from onpolicy.models.text_part import WHOLE_MODELS
from tests.support.forked_processes import forked_processes
from tests.support.published import FILES, make_published, published
from tests.support.tiny import ALL_ARCHITECTURES, make_checkpoint

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"

TP = ("--sglang-tp-size", "2", "--temperature", "0.7", "--dtype", "float32")
COLUMNS = {
    "float32": ("--dtype", "float32", "--temperature", "0.7"),
    "bfloat16": ("--dtype", "bfloat16"),
    "tensor-parallel 2": TP,
    "Megatron": ("--train-backend", "megatron", "--dtype", "float32", "--temperature", "0.7"),
    "LoRA": ("--lora-rank", "4", "--dtype", "float32", "--temperature", "0.7"),
    "images": ("--images", "--dtype", "bfloat16", "--num-prompts", "12", "--max-new-tokens", "6"),
}
"""What each column adds to the command."""

TEXT_COLUMNS = [column for column in COLUMNS if column != "images"]
PUBLISHED_COLUMNS = ("float32", "bfloat16")
"""Those of the checkpoints as published."""

SEEING = [name for name in FILES if published(name).get("model_type") in WHOLE_MODELS]
"""Published checkpoints with a vision tower, which have a table of their own."""

CELLS = [
    *((architecture, column) for column in TEXT_COLUMNS for architecture in ALL_ARCHITECTURES),
    *((name, column) for column in PUBLISHED_COLUMNS for name in FILES),
    *((name, "images") for name in SEEING),
]
"""Every cell of the page."""

SIZE = ("--num-prompts", "6", "--max-new-tokens", "12")
LIMIT = 300
"""Seconds after which a cell has failed."""


HEAD = """# Architectures

Which models run on aligned operators? Those whose row says `0 of 144`: both engines gave each of 144
sampled tokens the same log-probability. `onpolicy verify --hf-checkpoint DIR` finds out the same for
your own checkpoint, at its real size.

`make architectures` makes a random checkpoint of a few layers of every architecture
(`tests/support/tiny.py`) and runs `onpolicy verify` on it: the real SGLang server and the real trainer
on a CPU, with prompts in chunks, cache hits, an optimizer step and a push. The temperature is 0.7, and
1 in bfloat16. The command writes this page from [a
record](../benchmarks/results/architectures.json); edit neither by hand.

| | meaning |
|---|---|
| n of m | n of m sampled tokens had another log-probability on the other side |
| refused | the command says why ([below](#why-some-are-refused)) before it starts anything |
| **bold** | an open fault: the run stops at the first token that differs, or its engine does not start |
| tensor-parallel 2 | a rollout on two ranks and a trainer on one, in float32 |
| Megatron | `--train-backend megatron`, in float32 |
| LoRA | `--lora-rank 4`, in float32 |

`tests/onpolicy/models/test_architectures.py` and `test_published.py` beside it try the same without
servers, in seconds.
"""

PUBLISHED_HEAD = """
## As published

These are checkpoints as their publishers ship them, shrunk: `tests/support/published/` has the
config.json of each, with its keys, scaling, windows, code and quantisation, and the weights are in
several files. Checkpoints with LongRoPE ran with their long factors; of models that also see images
[the text part](published.md#models-that-also-see-images) ran.
"""

SEEING_HEAD = """
## With images

Of these the whole was published, with a vision tower. `bfloat16` is text alone, as above;
`images` is `onpolicy verify --images`: three of four prompts have one or two pictures of random size
among their tokens, some share them, and the step trains the tower too ([images](images.md)). FSDP2
trains them; Megatron and tensor parallelism are refused with `--images`.
"""

REFUSALS_HEAD = """
## Why some are refused
"""


def read():
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results


def run_cell(architecture, column):
    """One command on real engines: how many tokens differ, or what it said."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        checkpoint, report = work / "model", work / "report.json"
        try:
            _make(checkpoint, architecture)
        except ConfigError as error:
            return {"refused": _without(checkpoint, str(error))}
        command = [
            *(sys.executable, "-m", "onpolicy.cli", "verify", "--hf-checkpoint", str(checkpoint)),
            *("--json", str(report), "--run-dir", str(work / "run"), *SIZE, *COLUMNS[column]),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {LIMIT} seconds"}
        last = (done.stderr.strip().splitlines() or ["says nothing"])[-1]
        if done.returncode == 2:
            return {"refused": _without(checkpoint, last.removeprefix("ConfigError: "))}
        if not report.exists():
            return {"failed": last}
        counts = json.loads(report.read_text())
        cell = {name: counts[f"num_{name}_tokens"] for name in ("compared", "mismatched")}
        return cell if done.returncode == 0 or cell["mismatched"] else {"failed": last}


def _make(directory, name):
    """A checkpoint of an architecture, or one as published. Raises ConfigError if it cannot be read."""
    (make_checkpoint if name in ALL_ARCHITECTURES else make_published)(directory, name)


def _without(directory, text):
    """Without a name that is another in every call."""
    return text.replace(str(directory), "DIR")


def write_down(architecture, column, cell):
    """Add a cell to what is written down by now, and render the page."""
    results = read()
    results.setdefault(architecture, {})[column] = cell
    text = json.dumps(results, indent=1, sort_keys=True)
    for path, content in ((RESULTS, text + "\n"), (PAGE, page(results))):
        temporary = path.with_suffix(".part")
        temporary.write_text(content)
        temporary.replace(path)


def page(results):
    saved = _table("architecture", ALL_ARCHITECTURES, TEXT_COLUMNS, results)
    shrunk = _table("checkpoint", FILES, PUBLISHED_COLUMNS, results)
    seeing = _table("checkpoint", SEEING, ("bfloat16", "images"), results)
    reasons = list(_reasons(results))
    refusals = [REFUSALS_HEAD, *reasons] if reasons else []
    tables = [HEAD, *saved, PUBLISHED_HEAD, *shrunk, SEEING_HEAD, *seeing]
    return "\n".join([*tables, *refusals, ""])


def _table(kind, names, columns, results):
    """A row for all names of which the same came."""
    yield f"| {kind} | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    rows = {}
    for name in names:
        cells = results.get(name, {})
        row = " | ".join(_shown(cells.get(column)) for column in columns)
        rows.setdefault(row, []).append(_name(name))
    for row, alike in rows.items():
        yield f"| {', '.join(alike)} | {row} |"


def _name(name):
    if name in FILES:
        return f"`{name}`"
    return f"{ALL_ARCHITECTURES[name][0].__name__.removesuffix('Config')} (`{name}`)"


def _shown(cell):
    if cell is None:
        return "not run"
    if "compared" in cell:
        count = f"{cell['mismatched']} of {cell['compared']}"
        return f"**{count}**" if cell["mismatched"] else count
    return "refused" if "refused" in cell else "**fails**"


def _reasons(results):
    """A line for each sentence: what it is said of, in which columns."""
    said = {}
    for name in dict.fromkeys((*ALL_ARCHITECTURES, *FILES)):
        columns = {}
        for column in COLUMNS:
            cell = results.get(name, {}).get(column, {})
            if text := cell.get("refused") or cell.get("failed"):
                text = text.removeprefix("--hf-checkpoint=DIR: ")
                text = re.sub(r"(model_type|architecture)=\w+", r"\1=...", text)  # one line for all
                columns.setdefault(text, []).append(column)
        for text, those in columns.items():
            said.setdefault(text, {}).setdefault(", ".join(those), []).append(f"`{name}`")
    for text, places in said.items():
        whose = ", and ".join(f"{', '.join(names)} in {those}" for those, names in places.items())
        yield f"- {whose}: {text}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    names = (*ALL_ARCHITECTURES, *FILES)
    parser.add_argument("--only", default=",".join(names), help="names, with commas")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="names, with commas")
    parser.add_argument("--again", action="store_true", help="also cells that are written down")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    arguments = parser.parse_args()
    written = {} if arguments.again else read()
    only, columns = arguments.only.split(","), arguments.columns.split(",")
    missing = [
        (name, column)
        for name, column in CELLS
        if name in only and column in columns and column not in written.get(name, {})
    ]
    with forked_processes(), ThreadPoolExecutor(arguments.jobs) as jobs:
        running = {jobs.submit(run_cell, *cell): cell for cell in missing}
        for done in as_completed(running):
            write_down(*running[done], done.result())
            print(*running[done], done.result(), flush=True)
    PAGE.write_text(page(read()))


if __name__ == "__main__":
    main()
