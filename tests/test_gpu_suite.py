"""The GPU suite and the GPU benchmark, whose code runs where there is no GPU.

A rehearsal executes the very tests of tests/gpu with small sizes, on the CPU operators. It says nothing
about a GPU's bits.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_ops import __main__ as bench
from benchmarks.gpu_ops import attention, linears, report, rowwise
from benchmarks.gpu_ops.cases import Case, Goal
from onpolicy.errors import ContractError
from onpolicy.ops.cpu import CpuOperators
from tests.gpu import run
from tests.gpu.tally import Tally
from tests.support.gpu.machine import write_json
from tests.support.gpu.operators import make_gpu_operators
from tests.support.gpu.shapes import TINY

pytestmark = pytest.mark.runs

ROOT = Path(__file__).parents[1]

# What the machine with the GPU does not have, and pytest plug-ins of ours among it.
ABSENT = (
    "accelerate", "aiohttp", "hypothesis", "matplotlib", "sgl_kernel", "sglang", "tyro", "xdist",
    "xxhash",
)  # fmt: skip
WITHOUT = f"""
import sys
from importlib.machinery import PathFinder
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] not in {ABSENT}:
            return super().find_spec(name, path, target)
sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""
SUITE = "import pytest\nsys.exit(pytest.main(sys.argv[1:]))"
A_POLICY = """
import benchmarks.gpu_ops.__main__
from transformers import Qwen3Config
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.policy import PolicyModel
sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=99)
model = empty_causal_lm(Qwen3Config(**sizes), trust_remote_code=False)
print(*{parameter.device.type for parameter in model.parameters()}, flush=True)
"""


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """(what a process prints that makes a policy and then rehearses the suite, its tests)"""
    file = tmp_path_factory.mktemp("gpu") / "gpu_test.json"
    command = [sys.executable, "-c", "\n".join([WITHOUT, A_POLICY, SUITE]), "tests/gpu"]
    done = subprocess.run(
        [*command, "--confcutdir=tests/gpu", "--rehearse", "--gpu-json", str(file)],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    tests = json.loads(file.read_text())["tests"]
    return done.stdout, {name.removeprefix("tests/gpu/"): test for name, test in tests.items()}


def test_benchmark_and_policy_need_torch_triton_and_transformers_alone(rehearsal):
    assert rehearsal[0].splitlines()[0] == "meta"


def test_every_test_of_the_suite_runs_on_the_cpu_operators(rehearsal):
    skipped = {
        name.partition("::")[2].partition("[")[0]
        for name, test in rehearsal[1].items()
        if test["outcome"] != "passed"
    }
    assert skipped == {
        "test_sglangs_own_matmul_launches",
        "test_an_experts_row_does_not_depend_on_the_other_rows",  # of a dense model
        "test_results_and_gradients_of_experts_are_right_and_gradients_repeat",
        "test_verify_finds_no_mismatch",
        "test_flash_attention_3_with_free_splits_depends_on_the_batch",
        "test_flash_attention_3_without_chunks_has_other_bits_than_with_them",
    }


def test_the_summary_counts_what_was_compared(rehearsal):
    for name, test in rehearsal[1].items():
        if test["outcome"] == "passed" and "tally" in test:
            tally, is_control = test["tally"], name.startswith("test_negative_controls")
            assert tally["cases"] > 0 and tally["values"] > 0, name
            assert (tally["mismatched_cases"] > 0) == is_control, name
    assert sum("tally" in test for test in rehearsal[1].values()) > 50


ONE_TO_THREE = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    "got",
    [
        torch.tensor([1.0, 2.0, 3.0000002]),
        torch.tensor([1.0, 2.0, float("nan")]),
        ONE_TO_THREE.double(),
        ONE_TO_THREE[:, None],
    ],
    ids=["the last bit", "NaN", "dtype", "shape"],
)
def test_a_tally_sees_one_bit(got):
    tally = Tally()
    tally.equal(ONE_TO_THREE.clone(), ONE_TO_THREE, "same")
    tally.require_none()
    tally.equal(got, ONE_TO_THREE, "other")
    assert (tally.cases, tally.mismatched_cases) == (2, 1)
    with pytest.raises(AssertionError, match="1 of 2 cases differ: other"):
        tally.require_none()


def test_a_mismatch_names_its_first_row_and_column():
    want = torch.zeros(3, 4, 5)
    got = want.clone()
    got[1, 2, 3] = got[2, 0, 1] = 1
    tally = Tally()
    tally.equal(got, want, "attention")
    tally.close(got, want.double(), 0.5, "accuracy")
    place = "first: row 1, 2 (of 2 such rows), column 3 (of 1, the last 3): 1.0, not 0.0"
    assert all(place in text for text in tally.first)


@pytest.mark.parametrize(("got", "differs"), [(2.25, 0), (3.0, 1), (float("nan"), 1)])
def test_a_tally_measures_errors_against_their_bound(got, differs):
    tally = Tally()
    tally.close(torch.tensor([1.0, got]), torch.tensor([1.0, 2.0]).double(), 0.5, "case")
    assert tally.mismatched_cases == differs
    assert tally.largest_error == 0.5 or differs


def test_a_tally_that_compared_nothing_fails():
    with pytest.raises(AssertionError, match="nothing was compared"):
        Tally().require_none()
    with pytest.raises(AssertionError, match="cannot tell stock kernels from aligned"):
        Tally(cases=3).require_some()


PROCESS = """
import json, os, signal, sys
name, part = sys.argv[1].removesuffix(".py").rpartition("/")[2], sys.argv[3]
print("in", name, sys.argv[4:])
test = {"outcome": "failed" if name == "test_rows" else "passed", "seconds": 1.0, "reason": "bits"}
json.dump({"tests": {f"{name}::test": test}}, open(part, "w"))
if name == "test_gemm":
    os.kill(os.getpid(), signal.SIGSEGV)
sys.exit({"test_rows": 1, "test_server": 5}.get(name, 0))
"""
"""Stands for pytest with one file of the suite."""


def test_a_file_that_dies_takes_no_other_along_and_the_page_says_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "PYTEST", (sys.executable, "-c", PROCESS))
    arguments = ["--json", str(tmp_path / "gpu_test.json"), "--jobs", "4"]
    assert run.main([*arguments, "--gpu-models", "Qwen3-4B"]) == 1
    record = json.loads((tmp_path / "gpu_test.json").read_text())
    assert record["outcomes"] == {"crashed": 1, "failed": 1, "passed": len(run.FILES) - 1}
    page = (tmp_path / "gpu_test.md").read_text()
    assert page in capsys.readouterr().out
    assert "`tests/gpu/test_gemm.py`: its process ended with status -11" in page
    assert "`test_rows::test`: bits" in page and "What to send back" in page
    log = (tmp_path / "gpu_test" / "test_attention.log").read_text()
    assert "in test_attention ['--gpu-models', 'Qwen3-4B']" in log


def test_every_file_of_the_suite_is_run():
    assert {*run.FILES} == {file.stem for file in (ROOT / "tests/gpu").glob("test_*.py")}


def test_the_benchmark_refuses_a_machine_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--seconds", "1"]) == 2
    assert "torch finds none here" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_backends_that_a_machine_cannot_keep_are_named():
    aligned, lacks = bench.make_aligned(["triton", "hopper"])
    assert not aligned and set(lacks) == {"triton", "hopper"}
    for problem in lacks.values():
        assert "compute capability=none" in problem
    with pytest.raises(ContractError, match="compute capability=none"):
        make_gpu_operators("hopper")


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The benchmark's own sizes would take minutes here, and its device does not exist."""
    for module in (linears, rowwise):
        monkeypatch.setattr(module, "ROW_COUNTS", (1, 8))
    monkeypatch.setattr(attention, "DECODING", ((2, 64),))
    monkeypatch.setattr(attention, "PACKED", ((2, 32),))


def test_every_call_of_the_benchmark_runs(on_a_cpu):
    """Each variant once, on CPU operators; what aligned and replaced operators return is close."""
    kinds = [
        linears.linear_cases, linears.row_parallel_cases, attention.attention_cases,
        rowwise.rowwise_cases,
        lambda shape: linears.expert_cases(replace(shape, experts=4, experts_per_token=2)),
    ]  # fmt: skip
    aligned = {"cpu": CpuOperators(1)}
    names = set()
    for case in (case for kind in kinds for case in kind(TINY)):
        calls, sets = case.make(aligned, 50 << 20)
        results = {name: call(sets - 1) for name, call in calls.items()}
        assert "cpu" in results and len(results) >= 2, case
        names.add(case.operator)
        if case.operator in ("linear", "row_parallel_linear", "rms_norm", "gated", "log_softmax"):
            first, *others = results.values()
            for other in others:
                torch.testing.assert_close(other, first, rtol=0.05, atol=0.05)
    assert len(names) == 12


CEILINGS = {"flops": 1e15, "bandwidth": 4e12}


def make_case(goal, flops=2e12, moved=4e9, make=None):
    return Case(
        operator="linear", where="x", rows=8, flops=flops, bytes=moved, goal=goal, make=make
    )


@pytest.mark.parametrize(
    "goal, seconds, met",
    [
        (Goal(0.95, "torch.mm"), {"torch.mm": 2.0e-3, "triton": 2.1e-3}, True),
        (Goal(0.95, "torch.mm"), {"torch.mm": 2.0e-3, "triton": 2.2e-3}, False),
        (Goal(0.9, "bandwidth"), {"torch.mm": 9.0, "triton": 1.1e-3}, True),
        (Goal(0.9, "bandwidth"), {"torch.mm": 9.0, "triton": 1.2e-3}, False),
        (Goal(0.95, "FA3"), {"SDPA": 1.0, "triton": 0.1}, None),
        (None, {"torch.mm": 1.0, "triton": 9.0}, None),
    ],
)
def test_goals(goal, seconds, met):
    record = report.describe(make_case(goal), seconds, ["triton"], CEILINGS)
    assert record["variants"]["triton"]["goal_met"] is met
    words = {True: "met", False: "missed", None: "not judged" if goal else "-"}[met]
    assert report.verdict(record, "triton").endswith(words)


def test_the_page_holds_every_case_and_what_is_missing(tmp_path):
    goal = Goal(0.9, "torch.mm")
    seconds = {"torch.mm": 1e-3, "triton": 1e-3, "hopper": 2e-3}
    records = [report.describe(make_case(goal), seconds, ["triton", "hopper"], CEILINGS)]
    result = {
        "machine": {"device": "a GPU"},
        "ceilings": CEILINGS,
        "goals": report.count_goals(records),
        "cases": records,
        "failed": [{"case": "one", "error": "no memory"}],
        "not_measured": ["another"],
    }
    page = report.markdown(result)
    assert "| linear | x | 8 | triton | 1000.0 |" in page
    assert "0.9 of torch.mm: met" in page and "0.9 of torch.mm: missed" in page
    assert "Goals met: 1, missed: 1, not judged: 0" in page
    assert "one: no memory" in page and "another" in page
    assert "missed" in report.line(records[0])
    write_json(tmp_path / "sub" / "out.json", result)
    assert json.loads((tmp_path / "sub" / "out.json").read_text()) == result
    assert [file.name for file in (tmp_path / "sub").iterdir()] == ["out.json"]
