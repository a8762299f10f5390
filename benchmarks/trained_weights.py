"""Every claim of bitwise parity on trained weights: SmolLM2-135M-Instruct and Gemma-3-270M.

    python -m benchmarks.trained_weights [--only SmolLM2] [--again]

A row is a command of its own on real engines. `onpolicy verify` takes random prompts of up to 192
tokens with shared prefixes, chunked prefills and cache hits, an optimizer step and a push, and compares
2 x 6 x 24 tokens. What it cannot show, `onpolicy train` does on the example's own prompts, 2 x 4
answers a rollout: the gate's tokens and the probe's are counted together. Gemma's `verify` takes no
optimizer step and its `train` trains adapters, for want of memory. A command that is refused before it
starts is recorded with its words. Expected: not one mismatched token, and none that its seed
draws otherwise in the trainer.

A row is written to benchmarks/results/trained_weights.json as soon as it has ended, and a second call
goes on with those that are missing. The table in docs/trained_weights.md is rendered from the record.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onpolicy.agents.tools.calculator import Calculator
from onpolicy.system import files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "common"))

import page_tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "trained_weights.json"
PAGE = ROOT / "docs" / "trained_weights.md"
WORK = ROOT / "runs" / "trained_weights"

MODELS = {"SmolLM2-135M": "smollm2", "Gemma-3-270M": "gemma3_lora"}
"""The example of each model, which prepares it."""

PROMPTS = {"SmolLM2-135M": ("--apply-chat-template",), "Gemma-3-270M": ()}
REWARD = {"SmolLM2-135M": "math", "Gemma-3-270M": "exact"}
"""How each example's prompts are read and scored."""

VERIFY = {
    "float32": ("--dtype", "float32"),
    "bfloat16": (),
    "bfloat16, `--operators onednn`": ("--operators", "onednn"),
    "Megatron, float32": ("--train-backend", "megatron", "--dtype", "float32"),
    "Megatron, bfloat16": ("--train-backend", "megatron"),
    "tensor-parallel 2": ("--sglang-tp-size", "2"),
    "sums as on two ranks": ("--row-parallel-blocks", "2"),
    "LoRA": ("--lora-rank", "8"),
    "FP8 weights (`fp8_e4m3`)": ("--rollout-weight-format", "fp8_e4m3"),
    "4-bit weights (`int4_group128`)": ("--rollout-weight-format", "int4_group128"),
}
TRAIN = {
    "shared prefixes": ("--share-prefixes", "on"),
    "top-p 0.9": ("--rollout-top-p", "0.9"),
    "three turns with a calculator": (
        *("--environment", f"{__file__}:Calculated"),
        *("--rollout-max-context-len", "256"),
    ),
    "lag 1": ("--rollout-lag", "1"),
    "free": ("--rollout-schedule", "free", "--max-staleness", "1"),
}
CLAIMS = (*VERIFY, *TRAIN)

SIZE_VERIFY = ("--num-prompts", "6", "--max-prompt-len", "192", "--max-new-tokens", "24")
SIZE_TRAIN = (
    *("--num-rollout", "3", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4"),
    *("--rollout-max-response-len", "32", "--max-tokens-per-gpu", "2048", "--lr", "1e-5"),
)
LESS_MEMORY = {"SmolLM2-135M": ((), ()), "Gemma-3-270M": (("--no-step",), ("--lora-rank", "16"))}
"""The flags of `verify` and `train` that fit 12 GiB; to be trained whole the larger model needs 16."""

LIMIT = 900
"""Seconds after which a command has failed."""

Row = dict[str, Any]
Record = dict[str, dict[str, Row]]


class Calculated:
    """An episode in which a calculator reads the prompt's last sum to the policy after each action.

    It lasts three actions, each of them a line or a sentence.
    """

    stop = ("\n", ".")
    most_actions = 3

    def reset(self, prompt):
        self._sum = re.findall(r"\d+ \+ \d+", prompt.text)[-1]
        self._label, self._actions = prompt.label, 0

    async def step(self, action):
        self._actions += 1
        found = await Calculator().run(self._sum)
        said = f"\nThe calculator says {self._sum} = {found.text}.\n"
        return said, float(self._label in action), self._actions == self.most_actions


def command(model: str, claim: str, work: Path) -> list[str]:
    """Return the arguments of `onpolicy` for a row, with its results below `work`."""
    inputs = WORK / MODELS[model]
    common = ["--hf-checkpoint", str(inputs / "model"), "--run-dir", str(work / "run")]
    of_verify, of_train = LESS_MEMORY[model]
    if claim in VERIFY:
        report = ["--json", str(work / "report.json")]
        return ["verify", *common, *report, *SIZE_VERIFY, *of_verify, *VERIFY[claim]]
    data = ["--prompt-data", str(inputs / "data.jsonl"), *PROMPTS[model]]
    if "--environment" not in TRAIN[claim]:
        data += ["--rm-type", REWARD[model]]
    mode = ["--true-on-policy-mode", "--operators", "onednn"]
    return ["train", *common, *data, *mode, *SIZE_TRAIN, *of_train, *TRAIN[claim]]


def run_row(model: str, claim: str) -> Row:
    """Run one command on real engines, and return how many tokens differ, or what it said."""
    work = WORK / "row"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    arguments = command(model, claim, work)
    shown = "onpolicy " + " ".join(arguments).replace(f"{ROOT}/", "")
    started, load = time.monotonic(), os.getloadavg()[0]
    with (work / "said").open("w") as said:
        try:
            code: int | None = subprocess.run(
                [sys.executable, "-m", "onpolicy.cli", *arguments],
                stdout=subprocess.DEVNULL,
                stderr=said,
                timeout=LIMIT,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    seconds = round(time.monotonic() - started)
    row = {"command": shown, "seconds": seconds, "load": round(load, 1), "exit_code": code}
    if code is None:
        return row | {"failed": f"not done after {LIMIT} seconds"}
    last = ((work / "said").read_text().strip().splitlines() or ["says nothing"])[-1]
    if code == 2:
        return row | {"refused": last.replace(str(ROOT) + "/", "")}
    found = counts(work, claim)
    return row | found if code == 0 or found["mismatched"] else row | {"failed": last}


def counts(work: Path, claim: str) -> Row:
    """Return compared, mismatched and otherwise drawn tokens of a command that has ended."""
    if claim in VERIFY:
        report = work / "report.json"
        steps = [json.loads(report.read_text())] if report.exists() else []
        places = ("",)
    else:
        steps = list(map(json.loads, (work / "run" / "metrics.jsonl").read_text().splitlines()))
        places = ("parity/", "probe/")
    return {
        name: sum(
            int(step.get(f"{place}num_{name}_tokens", 0)) for step in steps for place in places
        )
        for name in ("compared", "mismatched", "drawn_otherwise")
    }


def read() -> Record:
    """Return what is recorded."""
    record: Record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return record


def write(record: Record) -> None:
    """Write the record, and its table into the page if there is one."""
    files.write(RESULTS, json.dumps(record, indent=1) + "\n")
    if PAGE.exists():
        files.write(PAGE, page_tables.between(PAGE.read_text(), "claims", table(record)))


def table(record: Record) -> str:
    """Return the table of the page: a line for each claim, a column for each model."""
    cells = {c: [shown(record.get(model, {}).get(c)) for model in MODELS] for c in CLAIMS}
    rows = ([claim, *told] for claim, told in cells.items())
    return page_tables.table(("claim", *MODELS), rows)


def shown(row: Mapping[str, Any] | None) -> str:
    """Return the text of a cell."""
    if row is None:
        return "not run"
    if "refused" in row:
        return "refused"
    if "failed" in row:
        return "**fails**"
    count = f"{row['mismatched']} of {row['compared']:,}"
    return f"{f'**{count}**' if row['mismatched'] else count}, {row['seconds']} s"


def prepare(models: Sequence[str]) -> None:
    """Make each model's checkpoint and prompts, by its example."""
    for model in models:
        script = ROOT / "examples" / MODELS[model] / "prepare.py"
        subprocess.run([sys.executable, str(script), str(WORK / MODELS[model])], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", default="", help="what a model's name contains")
    parser.add_argument("--claims", default="", help="what a claim's name contains")
    parser.add_argument("--again", action="store_true", help="also rows that are recorded")
    args = parser.parse_args()
    models = [model for model in MODELS if args.only in model]
    prepare(models)
    for model in models:
        for claim in CLAIMS:
            record = read()
            if args.claims in claim and (args.again or claim not in record.get(model, {})):
                row = run_row(model, claim)
                print(model, claim, row, flush=True)
                if "GiB free" not in row.get("refused", ""):  # which says nothing about the claim
                    record.setdefault(model, {})[claim] = row
                    write(record)
    write(read())


if __name__ == "__main__":
    main()
