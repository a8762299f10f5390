"""Megatron-core as the trainer of real SGLang servers: `onpolicy verify`, with its step and push."""

import json

import pytest

from tests.support.tiny import make_checkpoint
from tests.support.train_runs import onpolicy

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.engine, pytest.mark.runs]

PROMPTS, TOKENS = 6, 12
LORA = ("--lora-rank", "4")
SEQUENCE = ("--megatron-tp", "2", "--megatron-sequence-parallel")
ROUNDED = (
    "--rollout-weight-format", "int4_group128",
    "--rollout-activation-format", "fp8_e4m3",
)  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "dtype", "ranks", "flags"),
    [
        ("glm4-moe", "bfloat16", 2, [*SEQUENCE, *ROUNDED]),
        ("qwen2", "float32", 2, ["--megatron-cp", "2"]),
        ("qwen3-tied", "bfloat16", 1, [*LORA, *ROUNDED[:2]]),
        ("qwen2", "bfloat16", 2, [*SEQUENCE, *LORA]),
        ("qwen3-tied", "bfloat16", 2, ["--megatron-pp", "2"]),
        ("qwen3-moe", "bfloat16", 2, ["--megatron-ep", "2", *LORA]),
    ],
)
def test_no_token_differs(architecture, dtype, ranks, flags, tmp_path):
    file = tmp_path / "report.json"
    onpolicy(
        "verify", "--actor-num-ranks-per-node", ranks, "--train-backend", "megatron", *flags,
        "--dtype", dtype, "--hf-checkpoint", make_checkpoint(tmp_path / "model", architecture),
        "--num-prompts", PROMPTS, "--max-new-tokens", TOKENS, "--cpu-threads", "1",
        "--json", file, "--run-dir", tmp_path / "run",
    )  # fmt: skip
    report = json.loads(file.read_text())
    assert report["num_compared_tokens"] == 2 * PROMPTS * TOKENS
    assert report["num_mismatched_tokens"] == 0


def test_a_layout_that_cannot_be_is_refused_before_anything_starts(checkpoint):
    argv = ["--hf-checkpoint", checkpoint, "--train-backend", "megatron", "--megatron-tp", "4"]
    error = "--megatron-tp=4: does not divide num_key_value_heads=2"
    assert error in onpolicy("verify", *argv, code=2).stderr
