"""Whole engines on one GPU, side by side: `python -m tests.gpu.engines --json FILE [--only NAME ...]`.

Each is a command of a user's, with a server and a trainer on the GPU, that no GPU has run as it is now.
Every token must have the same bits on both sides. Prints a line of JSON as soon as a command has ended.
Makes what it needs under --inputs: random weights of Qwen3-0.6B's sizes, and the quickstart's data.
--rehearse runs one command on a CPU, on a tiny model.
"""

import argparse
import json
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

LAST_LINES = 8


def commands(inputs, folder):
    real, data = str(inputs / "qwen3-0.6b"), str(inputs / "data.jsonl")

    def verify(operators, *flags):
        lengths = ["--num-prompts", "16", "--max-new-tokens", "64"]
        return ["verify", "--hf-checkpoint", real, "--operators", operators, *lengths, *flags]

    long_answers = [
        *("train", "--true-on-policy-mode", "--hf-checkpoint", real, "--prompt-data", data),
        *("--operators", "hopper", "--rm-type", "exact", "--num-rollout", "12"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
        *("--rollout-max-response-len", "512", "--max-tokens-per-gpu", "4096"),
    ]  # 12 rollouts are 12 releases of a server's memory, of which one in 40 failed once
    found = {
        "train_hopper": long_answers,
        "verify_deep_gemm": verify("deep_gemm"),
        "verify_fp8": verify("hopper_fp8", *IN_BYTES),
        "verify_int4": verify("triton", *INT4, "--lora-rank", "16"),
        "lora_hopper": verify("hopper", "--lora-rank", "16"),
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
    result = {
        "command": ["onpolicy", *command],
        "exit_code": done.returncode,
        "seconds": round(time.perf_counter() - started, 1),
        **_compared(folder, name),
    }
    if done.returncode:
        result["last_lines"] = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    print(json.dumps({"name": name, **result}), flush=True)
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
    return (
        f"exit code {result['exit_code']}, {result['num_mismatched_tokens']} of "
        f"{result['num_compared_tokens']} tokens mismatched, {result['seconds']:.0f} s"
    )


def failures(results):
    return [
        f"{name}: {summary(result)}"
        for name, result in results.items()
        if result["exit_code"]
        or result["num_mismatched_tokens"]
        or not result["num_compared_tokens"]
    ]


def rehearsal(inputs, folder):
    """One of the commands, small, without what needs a GPU."""
    command = commands(inputs, folder)["verify_deep_gemm"]
    at = command.index(SHARED[0])
    command[at : at + len(SHARED)] = []
    for flag, value in (("--operators", "cpu"), ("--num-prompts", "4"), ("--max-new-tokens", "8")):
        command[command.index(flag) + 1] = value
    return {"verify_deep_gemm": command}


def make_inputs(inputs, geometry="qwen3-0.6b"):
    real = inputs / "qwen3-0.6b"
    if not (real / "config.json").exists():
        make = [sys.executable, "-m", "benchmarks.random_checkpoint", "--geometry", geometry]
        subprocess.run([*make, str(real)], check=True)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10) for b in range(10)]
    (inputs / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(argv=None):
    """Run all side by side and write the record; return 1 if anything failed."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="the record")
    parser.add_argument("--only", nargs="+", help="these alone, by name")
    parser.add_argument("--inputs", type=Path, default=Path("runs/gpu_inputs"))
    parser.add_argument("--prepare", action="store_true", help="make the inputs, and end")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, small")
    args = parser.parse_args(argv)
    folder = args.json.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    make_inputs(args.inputs, "tiny" if args.rehearse else "qwen3-0.6b")
    if args.prepare:
        return 0
    chosen = (rehearsal if args.rehearse else commands)(args.inputs, folder)
    if unknown := set(args.only or ()) - set(chosen):
        parser.error(f"--only={', '.join(unknown)}: choose of {', '.join(chosen)}")
    chosen = {name: chosen[name] for name in args.only or chosen}
    with ThreadPoolExecutor(len(chosen)) as pool:
        results = list(pool.map(partial(run, folder=folder), chosen, chosen.values()))
    by_name = dict(zip(chosen, results, strict=True))
    write_json(args.json, {"machine": describe_machine(), "runs": by_name})
    failed = failures(by_name)
    print("\n".join(failed) or "all tokens are the same")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
