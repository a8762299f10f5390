"""The items of both calls, in their order: commands, time limits, and where each leaves its record."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = "benchmarks.gpu_quarter"
DEPTHS = (2, 10)
KINDS = "stock,hopper,deterministic,triton,deep_gemm"
CELLS = "1x1024,8x1024,64x1024,256x1024,1x8192,8x8192"
REWRITTEN = "attention,log_softmax,gather_log_probs,row_parallel,grouped"
"""Operators of which only single rows were measured, or none since they were rewritten."""
STEP_LAYERS = 8
FILES = ("test_gemm", "test_fp8", "test_rows", "test_attention")
MODELS = "Qwen3-4B,Qwen3-30B-A3B"
TESTS = "partial and 4B or expert and 30B or log_ or (attention or fp8) and not 30B"
"""Tests of what changed since a GPU ran them."""


@dataclass(frozen=True, slots=True)
class Item:
    """A question, and the command that answers it."""

    name: str
    seconds: float
    """The item's time limit."""
    command: list[str]
    record: Path | None = None
    """A JSON file that the command writes; it becomes part of the item's last line."""
    is_beside: bool = False
    """Whether the next items begin at once: it only prepares something, on the CPU."""
    after: str = ""
    """The item beside this one that must have ended first."""


def items(call: int, folder: Path, models: Path, rehearse: bool) -> list[Item]:
    """Return a call's items, which write into `folder` and make their checkpoints in `models`; those
    that only a GPU or carried weights can run are no part of a rehearsal."""
    return (_first if call == 1 else _second)(folder, models, rehearse)


def _module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]


def _first(folder: Path, models: Path, rehearse: bool) -> list[Item]:
    geometry, depths, layers, tokens = ("qwen3-4b", DEPTHS, STEP_LAYERS, 8192)
    kinds, cells, operators = KINDS, CELLS, "hopper"
    chosen = ["--only", REWRITTEN, "--models", MODELS, "--seconds", "45"]
    if rehearse:
        geometry, depths, layers, tokens = ("tiny", (1,), 1, 256)
        kinds, cells, operators = "stock,cpu", "1x16,3x32", "cpu"
        chosen = ["--rehearse"]
    shells = [models / f"{geometry}-{depth}-layers" for depth in depths]
    model, step, alone = models / f"{geometry}-for-steps", folder / "step.json", folder / "ops.json"
    make = ["benchmarks.random_checkpoint", "--geometry", geometry, "--layers", layers, model]
    decode = ["--kinds", kinds, "--cells", cells, "--models", *shells, "--lock", folder / "lock"]
    bench = ["bench", "step", "--hf-checkpoint", model, "--operators", operators]
    bench += ["--repetitions", 3, "--num-tokens", tokens, "--json", step]
    compiling = _module(f"{HERE}.gemm_paths", "--compile", 8)
    return [
        Item("machine", 30, _module(f"{HERE}.machine_lines", geometry, *shells)),
        Item("checkpoint", 240, _module(*make), is_beside=True),
        *([] if rehearse else [Item("compile", 200, compiling, is_beside=True)]),
        Item("gemm", 80, _module(f"{HERE}.gemm_paths")),
        Item("decode", 150, _module(f"{HERE}.decode_steps", *decode)),
        Item("operators", 65, _module("benchmarks.gpu_ops", *chosen, "--json", alone), alone),
        Item("step", 90, _module("onpolicy.cli", *bench), step, after="checkpoint"),
    ]


def _second(folder: Path, models: Path, rehearse: bool) -> list[Item]:
    record = folder / "tests.json"
    chosen = ["--gpu-models", MODELS, "-k", TESTS, "--files", *FILES]
    engines = ["tests.gpu.engines", "--json", folder / "engines.json"]
    engines += ["--inputs", models / "inputs"]
    if rehearse:
        chosen = ["--rehearse", "-k", "float32_operands", "--files", FILES[0]]
        engines.append("--rehearse")
    tests = _module("tests.gpu.run", "--json", record, "--jobs", 8, *chosen)
    found = [
        Item("inputs", 150, _module(*engines, "--prepare"), is_beside=True),
        Item("tests", 120, tests, record),
        Item("engines", 190, _module(*engines), after="inputs"),
        Item("trained", 110, ["bash", "-ec", _trained(folder, models)]),
    ]
    return found[1:3] if rehearse else found


def _trained(folder: Path, models: Path) -> str:
    """Return a script that verifies SmolLM2 where its weights were carried, and trains it."""
    inputs, onpolicy = models / "smollm2", f"{sys.executable} -m onpolicy.cli"
    shared = "--colocate --sglang-mem-fraction-static 0.3"
    data = f"--prompt-data {inputs}/data.jsonl --eval-prompt-data {inputs}/eval.jsonl"
    shared += f" --hf-checkpoint {inputs}/model"
    return f"""{sys.executable} examples/smollm2/prepare.py {inputs}
    {onpolicy} verify {shared} --num-prompts 8 --run-dir {folder}/smollm2_verify
    {onpolicy} train {shared} --custom-config-path examples/smollm2/config.yaml --operators auto \\
      {data} --num-rollout 3 --run-dir {folder}/smollm2_train"""
