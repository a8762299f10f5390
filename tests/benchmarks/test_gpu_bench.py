"""`make gpu-bench`: the parts that a CPU can run are run, with the sizes of a toy."""

import json
import sys

import pytest

from benchmarks import gpu_bench
from benchmarks.gpu_page import page
from onpolicy.cli.parse import parse
from onpolicy.config.tool_flags import BenchConfig
from tests.support.forked_processes import forked_processes

TOY = ["--geometry", "tiny", "--layers", "1"]


def bench(directory, *argv):
    file = directory / "gpu_bench.json"
    return gpu_bench.main([*TOY, "--models", str(directory), "--json", str(file), *argv]), file


@pytest.mark.runs
def test_steps_and_pushes_are_measured_on_one_page(tmp_path):
    """Servers: tests/e2e/test_bench.py."""
    with forked_processes():
        code, file = bench(
            tmp_path, "--parts", "step,push", "--num-tokens", "256", "--bucket-mib", "1"
        )
    record = json.loads(file.read_text())
    assert code == 0 and record["parts"].keys() == {"step", "push"}
    text = file.with_suffix(".md").read_text()
    assert "| 256 |" in text and "| tensor | 1 |" in text and "| distributed | 1 |" in text
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_servers_are_asked_for_with_flags_that_there_are(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(gpu_bench, "_model", lambda args: "model")
    monkeypatch.setattr(gpu_bench, "_measured", lambda command, _: asked.append(command) or {})
    bench(tmp_path, "--parts", "decode", "--batch-sizes", "1", "2", "--context-lens", "16")
    config = parse(BenchConfig, asked[0][4:], "onpolicy bench")
    assert (config.what, config.batch_sizes, config.context_lens) == ("decode", (1, 2), (16,))


@pytest.fixture
def parts(monkeypatch):
    def commands(args, model, record):
        write = f"open({str(record)!r}, 'w').write('{{\"by_num_tokens\": []}}')"
        return {
            "step": [sys.executable, "-c", write],
            "decode": [sys.executable, "-c", "import sys; sys.exit('out of memory')"],
        }

    monkeypatch.setattr(gpu_bench, "commands", commands)
    monkeypatch.setattr(gpu_bench, "_model", lambda args: None)


def test_a_part_that_fails_is_named_and_the_others_are_kept(parts, tmp_path):
    assert bench(tmp_path, "--parts", "step")[0] == 0
    code, file = bench(tmp_path, "--parts", "decode")
    record = json.loads(file.read_text())
    assert code == 1 and record["parts"].keys() == {"decode", "step"}
    assert "out of memory" in record["parts"]["decode"]["error"]
    text = file.with_suffix(".md").read_text()
    assert "## step" in text and "    exit code 1: out of memory" in text


def test_a_part_that_there_is_not_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench(tmp_path, "--parts", "step,steps")
    assert (
        "--parts=step,steps: no steps. Give of operators, decode, step, push"
        in capsys.readouterr().err
    )


def test_a_page_shows_deterministic_inference_beside_stock():
    def speed(tokens):
        return {"tokens_per_second": tokens, "runs": [tokens]}

    phase = {
        "aligned": speed(900.0), "stock": speed(1000.0), "deterministic": speed(600.0),
        "ratio": 0.9, "ratio_to": {"deterministic": 1.5},
    }  # fmt: skip
    cell = {"batch_size": 8, "context_len": 1024, "prefill": phase, "decode": phase}
    other = {"batch_size": 256, "context_len": 8192, "why": "a server's cache is too small"}
    part = {"cells": [cell], "not_measured": [other]}
    text = page({"machine": {"device": "a GPU"}, "model": "one", "parts": {"decode": part}})
    assert "| 1024 | 8 | decode | deterministic | 600 | 1.50 |" in text
    assert "Not measured: 256 x 8192; a server's cache is too small." in text
