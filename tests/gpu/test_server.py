"""A real SGLang server and a real trainer on GPUs, or on one: `onpolicy verify` on a tiny Qwen3."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

PACKAGES = ("sglang", "ray", "tyro", "aiohttp", "xxhash")
"""Requirements of the whole command, beyond those of the rest of this suite."""
PROMPTS, NEW_TOKENS = 16, 32


def test_verify_finds_no_mismatch(operators, backend, setting, tally, tmp_path):
    if setting.device != "cuda":
        pytest.skip("tests/e2e/test_verify.py does this on a CPU")
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    shared = ["--colocate"] if torch.cuda.device_count() == 1 else []
    from tests.support.tiny import make_checkpoint

    checkpoint = make_checkpoint(tmp_path / "model", head_dim=128, vocab_size=144, hidden_size=128)
    command = [
        sys.executable, "-m", "onpolicy.cli", "verify",
        "--hf-checkpoint", str(checkpoint), "--operators", backend,
        "--num-prompts", str(PROMPTS), "--max-new-tokens", str(NEW_TOKENS),
        "--json", str(tmp_path / "report.json"), "--run-dir", str(tmp_path / "run"),
        *shared,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "report.json").read_text())
    tally.cases, tally.values = 1, report["num_compared_tokens"]
    tally.mismatched_values = report["num_mismatched_tokens"]
    assert done.returncode == 0, report
    assert tally.values == 2 * PROMPTS * NEW_TOKENS
