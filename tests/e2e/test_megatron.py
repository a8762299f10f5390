"""Megatron-core as the trainer of real SGLang servers: `onpolicy verify`, with its step and push."""

import json
import subprocess
import sys

import pytest

from tests.support.tiny import make_checkpoint

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.engine, pytest.mark.runs]

PROMPTS, TOKENS = 6, 12
LORA = ("--lora-rank", "4")
ROUNDED = (
    "--rollout-weight-format", "int4_group128",
    "--rollout-activation-format", "fp8_e4m3",
)  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "dtype", "ranks", "flags"),
    [
        ("qwen3", "float32", 1, []),
        (
            "glm4-moe",
            "bfloat16",
            2,
            ["--megatron-tp", "2", "--megatron-sequence-parallel", *ROUNDED],
        ),
        ("qwen2", "float32", 2, ["--megatron-cp", "2"]),
        ("qwen3", "bfloat16", 2, ["--megatron-tp", "2", *LORA]),
        ("qwen3-tied", "bfloat16", 1, [*LORA, *ROUNDED[:2]]),
        ("qwen2", "bfloat16", 2, ["--megatron-tp", "2", "--megatron-sequence-parallel", *LORA]),
        ("qwen3-tied", "bfloat16", 2, ["--megatron-pp", "2"]),
        ("qwen3-moe", "bfloat16", 2, ["--megatron-ep", "2"]),
        ("qwen3-moe", "bfloat16", 2, ["--megatron-ep", "2", *LORA]),
    ],
)
def test_no_token_differs(architecture, dtype, ranks, flags, tmp_path):
    file = tmp_path / "report.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "onpolicy.cli", "verify",
            "--actor-num-ranks-per-node", str(ranks),
            "--train-backend", "megatron", *flags, "--dtype", dtype,
            "--hf-checkpoint", str(make_checkpoint(tmp_path / "model", architecture)),
            "--num-prompts", str(PROMPTS), "--max-new-tokens", str(TOKENS), "--cpu-threads", "1",
            "--json", str(file), "--run-dir", str(tmp_path / "run"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(file.read_text())
    assert report["num_compared_tokens"] == 2 * PROMPTS * TOKENS
    assert report["num_mismatched_tokens"] == 0


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--megatron-tp", "4"], "--megatron-tp=4: does not divide num_key_value_heads=2"),
        (["--megatron-cp", "2"], "world_size=1: no multiple of 2 = --megatron-tp 1 x"),
        (["--megatron-ep", "2"], "--megatron-ep=2: this model has no experts"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_anything_starts(checkpoint, flags, error):
    done = subprocess.run(
        [
            sys.executable, "-m", "onpolicy.cli", "verify", "--hf-checkpoint", str(checkpoint),
            "--train-backend", "megatron", *flags,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert error in done.stderr
