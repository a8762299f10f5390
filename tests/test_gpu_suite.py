"""The GPU suite and the GPU benchmark, where there is no GPU: skipped by name, and their code runs.

A rehearsal executes the very tests of tests/gpu with small sizes, on the CPU operators or with the
Triton kernels in the interpreter. It says nothing about a GPU's bits.
"""

import json
import os
import subprocess
import sys
from collections import deque
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_ops import __main__ as bench
from benchmarks.gpu_ops import attention, cases, linears, report, rowwise, timing
from benchmarks.gpu_ops.cases import Case, Goal
from onpolicy.errors import ContractError
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.cuda_toolkit import CudaToolkit
from onpolicy.ops.hopper import HopperOperators, flash_attention, gemm
from onpolicy.ops.machine import Machine
from onpolicy.ops.triton import TritonOperators
from tests.gpu import backends, run
from tests.gpu.setting import GPU
from tests.gpu.tally import Tally
from tests.support.gpu import launches
from tests.support.gpu.machine import write_json
from tests.support.gpu.operators import make_gpu_operators
from tests.support.gpu.paged_attention import PagedBatch, paged_attention_of
from tests.support.gpu.shapes import ModelShape

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


def run_suite(*arguments, before="", seconds=300):
    """The suite as `make gpu-test` starts it, without the packages of ABSENT, after other code."""
    code = "\n".join([WITHOUT, before, SUITE])
    return subprocess.run(
        [sys.executable, "-c", code, "tests/gpu", "--confcutdir=tests/gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def outcomes(file):
    tests = json.loads(file.read_text())["tests"]
    return {name.removeprefix("tests/gpu/"): test for name, test in tests.items()}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    file = tmp_path_factory.mktemp("gpu") / "gpu_test.json"
    done = run_suite("--rehearse", "cpu", "--gpu-json", str(file))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return outcomes(file)


@pytest.fixture(scope="module")
def without_a_gpu(tmp_path_factory):
    """(what a process prints that makes a policy, then runs the suite; the suite's file)."""
    file = tmp_path_factory.mktemp("skipped") / "gpu_test.json"
    done = run_suite("-rs", "-vv", "--gpu-json", str(file), before=A_POLICY)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout, file


def test_benchmark_and_policy_need_torch_triton_and_transformers_alone(without_a_gpu):
    assert without_a_gpu[0].splitlines()[0] == "meta"


def test_without_a_gpu_every_test_is_skipped_by_name(without_a_gpu):
    printed, file = without_a_gpu
    assert "needs a GPU: torch.cuda.is_available() is False" in printed
    assert " passed" not in printed and " skipped" in printed
    for name in ("triton-Qwen3-4B", "hopper-Qwen3-30B-A3B", "test_cublas_rows"):
        assert name in printed
    assert not file.exists()


def test_every_test_of_the_suite_runs_on_the_cpu_operators(rehearsal):
    skipped = {
        name.partition("::")[2].partition("[")[0]
        for name, test in rehearsal.items()
        if test["outcome"] != "passed"
    }
    assert skipped == {
        "test_sglangs_own_matmul_launches",
        "test_an_experts_row_does_not_depend_on_the_other_rows",  # of a dense model
        "test_results_and_gradients_of_experts_are_right_and_gradients_repeat",
        "test_verify_finds_no_mismatch",
        "test_flash_attention_3_with_free_splits_depends_on_the_batch",
    }


def test_the_summary_counts_what_was_compared(rehearsal):
    for name, test in rehearsal.items():
        if test["outcome"] == "passed" and "tally" in test:
            tally, is_control = test["tally"], name.startswith("test_negative_controls")
            assert tally["cases"] > 0 and tally["values"] > 0, name
            assert (tally["mismatched_cases"] > 0) == is_control, name
    assert sum("tally" in test for test in rehearsal.values()) > 50


def test_the_suite_runs_with_triton_kernels_in_the_interpreter(tmp_path):
    file = tmp_path / "gpu_test.json"
    chosen = "test_libraries or rms_norm or (sampled_tokens and qwen3-triton and not 0.7)"
    done = run_suite("--rehearse", "triton", "--gpu-json", str(file), "-k", chosen)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = [name for name, test in outcomes(file).items() if test["outcome"] == "passed"]
    assert len(passed) == 5


@pytest.mark.parametrize(
    "got",
    [[1.0, 2.0, 3.0000002], [1.0, 2.0, float("nan")]],
    ids=["the last bit", "NaN"],
)
def test_a_tally_sees_one_bit(got):
    want = torch.tensor([1.0, 2.0, 3.0])
    tally = Tally()
    tally.equal(want.clone(), want, "same")
    tally.require_none()
    tally.equal(torch.tensor(got), want, "other")
    assert (tally.cases, tally.mismatched_cases, tally.mismatched_values) == (2, 1, 1)
    with pytest.raises(AssertionError, match="1 of 2 cases differ: other"):
        tally.require_none()


def test_a_mismatch_names_its_first_row_and_column_and_the_kernel():
    want = torch.zeros(3, 4, 5)
    got = want.clone()
    got[1, 2, 3] = got[2, 0, 1] = 1
    tally = Tally()
    tally.equal(got, want, "attention")
    tally.close(got, want.double(), 0.5, "accuracy")
    place = "first: row 1, 2 (of 2 such rows), column 3 (of 1, the last 3): 1.0, not 0.0"
    assert all(place in text for text in tally.first)


def test_the_tile_of_a_launched_kernel_is_remembered(monkeypatch):
    monkeypatch.setattr(launches, "_last", deque(maxlen=2))

    class Kernel:
        __name__ = "_linear_kernel"

        def run(self, *args, **options):
            return len(args)

    Kernel.run = launches._watched(Kernel.run)
    for rows in (16, 64, 16):
        assert Kernel().run("x", ROWS=rows, num_warps=4, HAS_BIAS=False, grid=(1,), scale=0.5) == 1
    first = "_linear_kernel ROWS=16 num_warps=4 HAS_BIAS=False"
    assert launches.last_launches() == f"{first}; _linear_kernel ROWS=64 num_warps=4 HAS_BIAS=False"


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


@pytest.mark.parametrize("jobs", ["1", "4"])
def test_a_file_that_dies_takes_no_other_along_and_the_page_says_it(
    tmp_path, monkeypatch, capsys, jobs
):
    monkeypatch.setattr(run, "PYTEST", (sys.executable, "-c", PROCESS))
    arguments = ["--json", str(tmp_path / "gpu_test.json"), "--jobs", jobs]
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


def test_halves_of_hopper_are_tried_apart(monkeypatch):
    """On a machine that has DeepGEMM without FlashAttention-3."""
    facts = {"capability": (9, 0), "cuda_toolkit": CudaToolkit("/usr/local/cuda")}
    machine = Machine(packages={"triton": "3.6.0", "deep_gemm": "0.1.5"}, **facts)
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: machine))
    assert backends.obstacle("hopper", "test_gemm") is None
    for file in ("test_attention", "test_rows"):
        assert "sgl_kernel is missing" in backends.obstacle("hopper", file)
    monkeypatch.setattr(gemm, "loaded", lambda: None)
    operators = backends.make_for("hopper", "test_gemm", GPU)
    assert type(operators).attention is TritonOperators.attention
    assert type(operators).linear is HopperOperators.linear
    machine = Machine(packages={"triton": "3.6.0", "sgl_kernel": "0.4.5"}, **facts)
    assert backends.obstacle("hopper", "test_attention") is None
    assert "deep_gemm is missing" in backends.obstacle("hopper", "test_gemm")
    monkeypatch.setattr(flash_attention, "loaded", lambda: None)
    operators = backends.make_for("hopper", "test_attention", GPU)
    assert type(operators).attention is HopperOperators.attention
    assert type(operators).linear is TritonOperators.linear


def test_a_tally_takes_another_dtype_or_shape_for_a_mismatch():
    tally = Tally()
    tally.equal(torch.ones(2), torch.ones(2).double(), "dtype")
    tally.equal(torch.ones(2), torch.ones(2, 1), "shape")
    assert tally.mismatched_cases == 2


def test_a_tally_measures_errors_against_their_bound():
    tally = Tally()
    exact = torch.tensor([1.0, 2.0]).double()
    tally.close(torch.tensor([1.0, 2.25]), exact, 0.5, "within")
    assert tally.largest_error == 0.5
    tally.require_none()
    for wrong in (3.0, float("nan")):
        failing = Tally()
        failing.close(torch.tensor([1.0, wrong]), exact, 0.5, "beyond")
        assert failing.mismatched_cases == 1


def test_a_tally_that_compared_nothing_fails():
    with pytest.raises(AssertionError, match="nothing was compared"):
        Tally().require_none()
    with pytest.raises(AssertionError, match="cannot tell stock kernels from aligned"):
        Tally(cases=3).require_some()


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


@pytest.mark.skipif(find_spec("sgl_kernel") is not None, reason="sgl_kernel is installed")
def test_flash_attention_3_is_asked_of_the_library_that_sglang_calls():
    q, store = torch.zeros(1, 4, 128), torch.zeros(32, 2, 128)
    batch = PagedBatch.of(torch.tensor([[1, 0]]), 16, [1], [20])
    with pytest.raises(ContractError, match="sgl_kernel"):
        paged_attention_of("hopper")(q, store, store, batch, 1.0)


def test_the_benchmark_has_cases_of_every_kind_and_of_chosen_ones():
    everything = bench.make_cases([], [])
    first = {case.operator.split(",")[0] for case in everything[:8]}
    assert {"linear", "attention", "rms_norm", "grouped_linear", "row_parallel_linear"} <= first
    chosen = bench.make_cases(["linear"], ["Qwen3-8B"])
    assert {case.operator for case in chosen} == {"linear"}
    assert all("Qwen3-8B" in case.where for case in chosen)
    assert {case.rows for case in chosen} == {1, 8, 32, 128, 1024, 8192}


@pytest.mark.parametrize(
    "bytes_per_set, sets", [(1, 64), (25 << 20, 4), (60 << 20, 2), (1 << 30, 1)]
)
def test_operands_rotate_through_more_than_the_cache(bytes_per_set, sets):
    assert timing.num_sets(bytes_per_set, l2_bytes=50 << 20) == sets


TINY = ModelShape(
    name="tiny", hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=137
)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The benchmark's own sizes would take minutes here, and its device does not exist."""
    for module in (attention, cases, linears, rowwise):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    for module in (linears, rowwise):
        monkeypatch.setattr(module, "ROW_COUNTS", (1, 8))
    monkeypatch.setattr(linears, "sglang_matmul", lambda: None)  # needs a GPU
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


def test_rates_are_against_the_ceiling_that_binds():
    seconds = {"torch.mm": 2e-3, "triton": 4e-3}
    variants = report.describe(make_case(None), seconds, ["triton"], CEILINGS)["variants"]
    assert variants["torch.mm"]["tflops"] == pytest.approx(1000)
    assert variants["torch.mm"]["fraction_of_ceiling"] == pytest.approx(1)
    assert variants["triton"]["gb_per_s"] == pytest.approx(1000)
    assert variants["triton"]["speed_over"] == {"torch.mm": pytest.approx(0.5)}
    memory = report.describe(make_case(None, flops=0.0), seconds, ["triton"], CEILINGS)["variants"]
    assert memory["torch.mm"]["fraction_of_ceiling"] == pytest.approx(0.5)


def test_a_run_keeps_what_it_measured_when_a_case_fails_and_when_time_is_up(monkeypatch):
    def fails(aligned, l2_bytes):
        raise RuntimeError("no memory")

    def measures(aligned, l2_bytes):
        return {"torch.mm": lambda i: None, "triton": lambda i: clock.append(100.0)}, 1

    clock = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr(bench, "measure_ceilings", lambda l2_bytes: CEILINGS)
    monkeypatch.setattr(
        bench, "alternate", lambda calls, *_: {name: call(0) or 1.0 for name, call in calls.items()}
    )
    chosen = [make_case(Goal(0.9, "torch.mm"), make=make) for make in (fails, measures, measures)]
    records = [
        json.loads(json.dumps(record)) for record in bench.run(chosen, {"triton": None}, 1, 50.0)
    ]
    assert [len(r["failed"]) for r in records] == [0, 1, 1, 1]
    assert [len(r["cases"]) for r in records] == [0, 0, 1, 1]
    assert records[-1]["failed"][0]["error"] == "no memory"
    assert records[-1]["goals"] == {"met": 1, "missed": 0, "not judged": 0}
    assert len(records[-1]["not_measured"]) == 1


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
