"""`make gpu-quarter`: what has ended is in the record, whatever happens; both calls are rehearsed."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.gpu_quarter import __main__ as quarter
from benchmarks.gpu_quarter.decode_steps import run_side_by_side
from benchmarks.gpu_quarter.gemm_paths import measure
from benchmarks.gpu_quarter.machine_lines import make_shell
from benchmarks.gpu_quarter.quarter_items import Item, items
from benchmarks.gpu_quarter.quarter_page import extrapolated, page
from benchmarks.gpu_quarter.result_lines import lines_of, read_lines
from onpolicy.cli.parse import parse
from onpolicy.config.tool_flags import BenchConfig
from tests.support.gpu.shapes import TINY
from tests.support.train_runs import ROOT


def item(name, script, seconds=30.0, **more):
    return Item(name=name, seconds=seconds, command=[sys.executable, "-ISc", script], **more)


def run(chosen, folder, seconds=60.0):
    """(whether all ended well, the lines, those of outcomes by item)"""
    lines = []
    is_well = quarter.run(chosen, folder, lines.append, seconds)
    return is_well, lines, {line["item"]: line for line in lines if "outcome" in line}


def test_results_of_an_item_and_its_record_are_lines(tmp_path):
    record = tmp_path / "own.json"
    write = f"open({str(record)!r}, 'w').write('{{\"b\": 2}}')"
    script = f"print('loading'); print('{{\"a\": 1}}'); {write}"
    is_well, lines, ended = run([item("one", script, record=record)], tmp_path)
    assert is_well and [line["a"] for line in lines if "a" in line] == [1]
    assert ended["one"]["outcome"] == "ended" and ended["one"]["record"] == {"b": 2}


def test_an_item_that_fails_is_told_with_its_log_and_the_next_one_runs(tmp_path):
    is_well, _, ended = run(
        [item("one", "import sys; sys.exit('no memory')"), item("two", "print()")], tmp_path
    )
    assert not is_well and ended["one"]["outcome"] == "failed" and ended["one"]["exit_code"] == 1
    assert "no memory" in ended["one"]["log"] and ended["two"]["outcome"] == "ended"


def test_an_earlier_calls_record_is_not_taken_for_this_ones(tmp_path):
    record = tmp_path / "own.json"
    record.write_text('{"a": 1}')
    _, _, ended = run([item("one", "raise SystemExit(1)", record=record)], tmp_path)
    assert ended["one"]["outcome"] == "failed" and "record" not in ended["one"]


def test_a_record_that_was_cut_ends_no_call(tmp_path):
    record = tmp_path / "own.json"
    script = f"open({str(record)!r}, 'w').write('{{\"a\": ')"
    is_well, _, ended = run([item("one", script, record=record), item("two", "print()")], tmp_path)
    assert is_well and "record" not in ended["one"] and ended["two"]["outcome"] == "ended"


GRANDCHILD = """
import subprocess, sys, time
sleeper = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(600)"])
print('{"grandchild": %d}' % sleeper.pid, flush=True)
time.sleep(600)
"""


def test_a_grandchild_that_holds_the_output_does_not_hold_up_the_call(tmp_path):
    """As in python/cpython#76116, where a time limit waited for the other end of a pipe."""
    is_well, lines, ended = run([item("one", GRANDCHILD, 5.0), item("two", "print()")], tmp_path)
    (grandchild,) = (line["grandchild"] for line in lines if "grandchild" in line)
    assert not is_well and ended["one"]["outcome"] == "out of time"
    assert ended["two"]["outcome"] == "ended" and not psutil.pid_exists(grandchild)


def test_no_item_begins_when_the_calls_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(quarter, "GRACE", 1.0)
    chosen = [item("one", "import time; time.sleep(600)"), item("two", "print()")]
    _, _, ended = run(chosen, tmp_path, seconds=2.0)
    outcomes = [line["outcome"] for line in ended.values()]
    assert outcomes == ["out of time", "not begun"]


def test_an_item_waits_for_the_one_beside_that_it_needs(tmp_path):
    """The one beside ends only when the first has run, and the second needs what it made."""
    seen, made = str(tmp_path / "seen"), str(tmp_path / "made")
    wait = f"import os, time\nwhile not os.path.exists({seen!r}):\n  time.sleep(0.05)\n"
    chosen = [
        item("made", f"{wait}time.sleep(0.5); open({made!r}, 'w')", is_beside=True),
        item("first", f"open({seen!r}, 'w')"),
        item("second", f"open({made!r})", after="made"),
    ]
    is_well, _, ended = run(chosen, tmp_path)
    assert is_well and list(ended) == ["first", "made", "second"]


def test_a_line_that_was_cut_is_no_result():
    assert lines_of('{"a": 1}\nword\n{"b": 2}\n{"c": ') == [{"a": 1}, {"b": 2}]
    assert lines_of("{'a': 1}\n{\"b\": 2}\n") == [{"b": 2}]  # what a library prints


@pytest.mark.parametrize("call", [1, 2])
def test_a_call_fits_into_seven_minutes(call, tmp_path):
    chosen = items(call, tmp_path, tmp_path, False)
    assert sum(each.seconds for each in chosen if not each.is_beside) <= 420


def test_the_step_is_asked_for_with_flags_that_there_are(tmp_path):
    (step,) = (each for each in items(1, tmp_path, tmp_path, False) if each.name == "step")
    config = parse(BenchConfig, step.command[4:], "onpolicy bench")
    assert (config.what, config.num_tokens, config.operators.operators) == (
        "step",
        (8192,),
        "hopper",
    )


def test_an_item_that_there_is_not_is_refused(capsys):
    with pytest.raises(SystemExit):
        quarter.main(["--call", "2", "--only", "gemm", "tests"])
    assert "--only=gemm: call 2 has inputs, tests, engines, trained." in capsys.readouterr().err


def decoded(kind, layers, step, **more):
    cell = {"context_len": 1024, "batch_size": 8, "is_captured": True, "is_alone": True}
    return {"item": "decode", "kind": kind, "layers": layers, "step_ms": step, "forward_ms": 1.0,
            **cell, **more}  # fmt: skip


def test_two_depths_give_the_step_of_a_whole_model():
    shallow, deep = decoded("stock", 2, 1.5), decoded("stock", 10, 2.5)
    assert extrapolated(shallow, deep, "step_ms", layers=36) == 1.5 + 34 / 8
    aligned = [decoded("hopper", 2, 1.5), decoded("hopper", 10, 3.5)]
    text = page([shallow, deep, *aligned])
    assert "| 8 | 1024 | stock | 5.75 | 1.00 | 1.00 |" in text
    assert "| 8 | 1024 | hopper | 10.00 | 1.00 | 0.57 |" in text
    assert "| 8 | 1024 | triton | depth 2 alone |" in page([decoded("triton", 2, 1.5)])


def test_a_step_that_replayed_no_graph_is_told():
    """As in sgl-project/sglang#33483, where batches above the largest graph ran eagerly, unseen."""
    text = page([decoded("stock", 2, 1.5), decoded("stock", 10, 2.5, is_captured=False)])
    assert "| 5.75 eager |" in text
    text = page([decoded("stock", 2, 1.5, is_alone=False), decoded("stock", 10, 2.5)])
    assert "| 5.75 disturbed |" in text


def test_a_negative_control_that_does_not_differ_is_told():
    def line(path, rows):
        return {"item": "gemm", "path": path, "linear": "o", "out": 2560, "in": 4096,
                "differing_rows": rows, "microseconds": {"1": 2.0}}  # fmt: skip

    assert "shows nothing" in page([line("cublas", []), line("triton", [])])
    text = page([line("cublas", [1, 8]), line("triton", [])])
    assert "shows nothing" not in text and "| o | 2,560 x 4,096 | cublas | 1, 8 | 1: 2.0 |" in text


def test_a_path_that_fails_at_a_shape_takes_no_other_along():
    def refuses_the_head(x, weight):
        if len(weight) == TINY.vocab:
            raise RuntimeError("no such tile")
        return x @ weight.t()

    lines = []
    products = {"cublas": lambda x, weight: x @ weight.t(), "deep_gemm": refuses_the_head}
    measure(products, TINY, 8, lines.append)
    measured = {(line["path"], line["linear"]) for line in lines if "differing_rows" in line}
    names = TINY.joint_linears()
    assert measured == {(p, n) for p in products for n in names} - {("deep_gemm", "lm_head")}
    assert "deep_gemm lm_head failed: no such tile" in page([{"item": "gemm", **x} for x in lines])


@pytest.mark.runs
def test_an_engine_that_cannot_be_made_is_told_with_its_reason(tmp_path):
    make_shell("tiny", tmp_path / "tiny-1-layers")
    said = tmp_path / "said.jsonl"
    with open(said, "w") as output:
        pairs = [("fast", tmp_path / "tiny-1-layers")]
        assert run_side_by_side(pairs, "1x16", tmp_path / "lock", output.fileno()) == 1
    (line,) = read_lines(said)
    assert line["kind"] == "fast" and line["exit_code"] == 2 and "operators" in line["error"]
    assert "fast failed:" in page([{"item": "decode", **line}])


def begin(record, *arguments):
    command = [sys.executable, "-m", "benchmarks.gpu_quarter", "--rehearse", "--record"]
    return subprocess.Popen(
        [*command, str(record), *arguments], cwd=ROOT, stdout=subprocess.DEVNULL,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


@pytest.mark.runs
@pytest.mark.parametrize("cut", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_a_call_that_is_cut_loses_only_what_it_had_not_measured(tmp_path, cut):
    """As in ohdearquant/khive#2845, where a table printed after the last row was lost with all rows."""
    record = tmp_path / "quarter.jsonl"
    process = begin(record, "--only", "machine", "gemm", "decode")
    try:
        while not (begun := [x for x in read_lines(record) if x.get("path") == "cublaslt"]):
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(cut)
        process.wait()
    lines = read_lines(record)
    assert begun[0] in lines
    assert [line["item"] for line in lines if "outcome" in line] == ["machine"]
    assert any("machine" in line for line in lines) and all(line["rehearsal"] for line in lines)
    text = page(lines)
    assert "| machine | ended |" in text and "| gemm | cut |" in text and "cublaslt" in text
    (pid,) = (line["started"] for line in lines if line["item"] == "gemm" and "started" in line)
    if cut == signal.SIGTERM:
        assert not psutil.pid_exists(pid)
    else:
        os.killpg(pid, signal.SIGKILL)  # nobody is left who could


def rehearse(record, call):
    process = begin(record, "--call", str(call))
    code = process.wait(timeout=550)
    lines = read_lines(record)
    outcomes = {line["item"]: line["outcome"] for line in lines if "outcome" in line}
    assert code == 0 and set(outcomes.values()) == {"ended"}, json.dumps(lines)[-3000:]
    return lines, list(outcomes), record.with_suffix(".md").read_text()


@pytest.mark.runs
@pytest.mark.long
def test_the_first_call_is_rehearsed_with_cpu_operators(tmp_path):
    lines, names, text = rehearse(tmp_path / "quarter.jsonl", 1)
    assert {*names} == {"machine", "checkpoint", "gemm", "decode", "operators", "step"}
    rows = {line["path"]: line["differing_rows"] for line in lines if "differing_rows" in line}
    assert rows["cublas"] and not rows["triton"] and not rows["deep_gemm"]
    cells = {
        (line["kind"], line["layers"], line["batch_size"]) for line in lines if "step_ms" in line
    }
    assert cells == {(kind, 1, batch) for kind in ("stock", "cpu") for batch in (1, 3)}
    assert sum("profile_us" in line for line in lines) == 2
    assert "A rehearsal on a CPU" in text and "| 3 | 32 | cpu | depth 1 alone |" in text
    for part in ("gemm", "decode", "operators", "step"):
        assert f"## {part}" in text


@pytest.mark.runs
@pytest.mark.long
@pytest.mark.engine
def test_the_second_call_is_rehearsed_with_real_engines(tmp_path):
    _, names, text = rehearse(tmp_path / "quarter.jsonl", 2)
    assert names == ["tests", "engines"]
    assert "| verify_deep_gemm | 0 | 0 of " in text and "passed" in text
