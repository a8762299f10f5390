"""Whole engines on one GPU, side by side: `python -m tests.gpu.engines --json FILE [--only NAME ...]`.

Each is a command of a user's, with a server and a trainer on the GPU. Every token must have the same
bits on both sides, and runs that differ in nothing that may change a bit must end with the same hash.
Makes what it needs under --inputs: the quickstart's model and data, and random weights of Qwen3-0.6B's
sizes.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from onpolicy.outputs.metrics import read_jsonl
from tests.support.gpu.machine import describe_machine, write_json

ROOT = Path(__file__).parents[2]
ONPOLICY = (sys.executable, "-m", "onpolicy.cli")

SHARED = ("--colocate", "--sglang-mem-fraction-static", "0.2", "--sglang-max-total-tokens", "40000")
"""Flags for engines on one GPU: a server takes a part of the memory free at its start, and fills
little."""

IN_BYTES = (
    *("--rollout-weight-format", "fp8_e4m3_block128"),
    *("--rollout-activation-format", "fp8_e4m3"),
)

INT4 = ("--rollout-weight-format", "int4_group128")

SAME = ("train", "train_again")
"""Runs with one hash."""

RUN_HASH = re.compile(r"run hash\W+(\w+)")

LAST_LINES = 8


def commands(inputs, folder):
    small, real = str(inputs / "quickstart" / "model"), str(inputs / "qwen3-0.6b")
    data, held_out = (str(inputs / "quickstart" / name) for name in ("data.jsonl", "eval.jsonl"))

    def verify(model, operators, *flags):
        lengths = ["--num-prompts", "16", "--max-new-tokens", "64"]
        return ["verify", "--hf-checkpoint", model, "--operators", operators, *lengths, *flags]

    quickstart = [
        *("train", "--custom-config-path", str(ROOT / "examples/quickstart/config.yaml")),
        *("--hf-checkpoint", small, "--prompt-data", data, "--operators", "triton"),
        *("--eval-prompt-data", held_out, "--num-rollout", "10", "--eval-interval", "10"),
    ]
    long_answers = [
        *("train", "--true-on-policy-mode", "--hf-checkpoint", real, "--prompt-data", data),
        *("--operators", "hopper", "--rm-type", "exact", "--num-rollout", "3"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
        *("--rollout-max-response-len", "512", "--max-tokens-per-gpu", "4096"),
    ]
    found = {
        "train_hopper": long_answers,
        "verify_triton": verify(real, "triton"),
        "verify_hopper": verify(real, "hopper", "--rollout-activation-format", "fp8_e4m3"),
        "verify_deep_gemm": verify(real, "deep_gemm"),
        "verify_cublaslt": verify(real, "cublaslt"),
        "verify_fp8": verify(real, "hopper_fp8", *IN_BYTES),
        "verify_int4": verify(real, "triton", *INT4, "--lora-rank", "16"),
        "lora_hopper": verify(real, "hopper", "--lora-rank", "16"),
        "lora_triton": verify(small, "triton", "--lora-rank", "16"),
        "train": quickstart,
        "train_again": quickstart,
        "train_shared": [*quickstart, "--share-prefixes", "on"],
    }
    return {
        name: [*found[name], *SHARED, "--run-dir", str(folder / name)]
        + (["--json", str(folder / f"{name}.json")] if found[name][0] == "verify" else [])
        for name in found
    }


def run(name, command, folder):
    """Run a command; return its comparisons and results, and the end of its log."""
    started, log = time.perf_counter(), folder / f"{name}.log"
    with open(log, "w") as file:
        done = subprocess.run([*ONPOLICY, *command], stdout=file, stderr=subprocess.STDOUT)
    text = log.read_text(errors="replace")
    found = re.search(RUN_HASH, text)
    result = {
        "command": ["onpolicy", *command],
        "exit_code": done.returncode,
        "seconds": round(time.perf_counter() - started, 1),
        **_compared(folder, name),
        "run_hash": found and found[1],
    }
    if done.returncode:
        result["last_lines"] = text.splitlines()[-LAST_LINES:]
    print(f"{name}: {summary(result)}", flush=True)
    return result


def _compared(folder, name):
    """Return the number of compared and of differing tokens in a run's rollouts, or in `verify`."""
    metrics, report = folder / name / "metrics.jsonl", folder / f"{name}.json"
    records, prefix = (read_jsonl(metrics), "parity/") if metrics.exists() else ([], "")
    if report.exists():
        records.append(json.loads(report.read_text()))
    keys = ("num_compared_tokens", "num_mismatched_tokens")
    return {key: sum(record.get(prefix + key, 0) for record in records) for key in keys}


def summary(result):
    hashed = f", {result['run_hash']}" if result["run_hash"] else ""
    return (
        f"exit code {result['exit_code']}, {result['num_mismatched_tokens']} of "
        f"{result['num_compared_tokens']} tokens mismatched{hashed}, {result['seconds']:.0f} s"
    )


def failures(results):
    found = [
        f"{name}: {summary(result)}"
        for name, result in results.items()
        if result["exit_code"]
        or result["num_mismatched_tokens"]
        or not result["num_compared_tokens"]
    ]
    hashes = {results[name]["run_hash"] for name in SAME if name in results}
    return found + ([f"{', '.join(SAME)}: more than one hash"] if len(hashes) > 1 else [])


def make_inputs(inputs):
    quickstart, real = inputs / "quickstart", inputs / "qwen3-0.6b"
    prepare = [sys.executable, str(ROOT / "examples/quickstart/prepare.py"), str(quickstart)]
    subprocess.run(prepare, check=True)
    if not (real / "config.json").exists():
        make = [sys.executable, "-m", "benchmarks.random_checkpoint", "--geometry", "qwen3-0.6b"]
        subprocess.run([*make, str(real)], check=True)


def main(argv=None):
    """Run all side by side and write the record; return 1 if anything failed."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="the record")
    parser.add_argument("--only", nargs="+", help="these alone, by name")
    parser.add_argument("--inputs", type=Path, default=Path("runs/gpu_inputs"))
    args = parser.parse_args(argv)
    folder = args.json.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = commands(args.inputs, folder)
    if unknown := set(args.only or ()) - set(chosen):
        parser.error(f"--only={', '.join(unknown)}: choose of {', '.join(chosen)}")
    chosen = {name: chosen[name] for name in args.only or chosen}
    make_inputs(args.inputs)
    with ThreadPoolExecutor(len(chosen)) as pool:
        results = list(pool.map(partial(run, folder=folder), chosen, chosen.values()))
    by_name = dict(zip(chosen, results, strict=True))
    write_json(args.json, {"machine": describe_machine(), "runs": by_name})
    failed = failures(by_name)
    print("\n".join(failed) or "all tokens and hashes are the same")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
