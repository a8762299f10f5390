"""A profiled step: what it is made of, and that watching changes nothing."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.bench.own_process import USUAL_SUMS
from onpolicy.bench.profile import TOTAL, profile, table
from onpolicy.bench.setting import KINDS, setting
from onpolicy.bench.step import bench_step, step_measure
from onpolicy.bench.stopwatch import (
    BACKWARD,
    FORWARD,
    HEAD,
    OPERATORS,
    OPTIMIZER,
    Stopwatch,
    watched_operators,
    watching,
)
from onpolicy.compat.process import STRICT_SUMS
from onpolicy.config.groups import CheckpointConfig, CpuConfig
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.ops.base import Operators
from onpolicy.ops.cpu import CpuOperators
from onpolicy.training import make_trainer


@pytest.fixture
def config(checkpoint):
    return BenchConfig(
        what="step",
        profile=True,
        model=CheckpointConfig(hf_checkpoint=str(checkpoint), dtype="float32"),
        cpu=CpuConfig(cpu_threads=1),
        prompt_len=4,
        max_new_tokens=12,
        num_tokens=(64,),
        repetitions=1,
    )


NO_OPERATORS = {"rows_per_chunk", "whole", "run_pieces", "hold"}
ONLY_IN_ENGINES = {"add_rms_norm", "norm_rotary"}


def test_every_operator_of_a_trainer_is_of_one_kind():
    named = [name for names in OPERATORS.values() for name in names]
    declared = {
        n for n in dir(Operators) if not n.startswith("_") and callable(getattr(Operators, n))
    }
    assert len(named) == len(set(named))
    assert set(named) == declared - NO_OPERATORS - ONLY_IN_ENGINES


def test_sections_add_up_and_none_counts_what_is_inside_of_it(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    watch = Stopwatch()
    with watch.section("a"):
        with watch.section("b", BACKWARD), watch.section("a"):
            pass
        with watch.section("b"):
            pass
    assert watch.seconds == {
        ("a", FORWARD): 3,
        ("b", BACKWARD): 2,
        ("a", BACKWARD): 1,
        ("b", FORWARD): 1,
    }


def test_a_table_has_each_row_of_either_side_and_the_ratio_of_neighbours():
    ours = iter([{("linear", FORWARD): 2.0, (HEAD, BACKWARD): 1.0}, {("linear", FORWARD): 4.0}])
    theirs = iter([{("linear", FORWARD): 3.0}, {("linear", FORWARD): 2.0}])
    rows = profile({"aligned": lambda: next(ours), "stock": lambda: next(theirs)}, repetitions=2)
    assert [(row["row"], row["phase"], row["ratio"]) for row in rows] == [
        ("linear", FORWARD, (3 / 2 + 2 / 4) / 2),
        (HEAD, BACKWARD, None),
        (TOTAL, "", (3 / 3 + 2 / 4) / 2),
    ]
    assert rows[0]["aligned"] == {"seconds": 3.0, "runs": [2.0, 4.0]}
    lines = table(rows, ["aligned", "stock"]).splitlines()
    assert lines[1].split() == ["linear", "forward", "3000.0", "2500.0", "1.00"]
    assert lines[-1].split() == ["step", "3500.0", "2500.0", "0.75"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_operator_of_the_model_is_found_and_computes_what_it_does_unwatched(config, kind):
    hf_config = load_config(config.model.hf_checkpoint)
    trainer = make_trainer(*setting(config, hf_config, kind), 1)
    operators = trainer.policy.module.operators
    plain = trainer.log_probs([[5, 6, 7, 8]], [2], 1.0)
    with watching(trainer, hf_config.vocab_size) as watch:
        watched = trainer.log_probs([[5, 6, 7, 8]], [2], 1.0)
        step_measure(trainer, 64, config, 1)()
    assert torch.equal(plain[0], watched[0]) and trainer.policy.module.operators is operators
    expected = {*OPERATORS, HEAD} - {"experts", "recurrence"}
    assert {row for row, phase in watch.seconds if phase == BACKWARD} >= expected
    assert {row for row, phase in watch.seconds if phase == FORWARD} >= expected | {OPTIMIZER}
    assert min(watch.seconds.values()) > 0


@given(st.integers(1, 40))
def test_a_watched_operator_has_the_gradients_of_its_own_graph(rows):
    x, weight = torch.randn(rows, 8), torch.randn(8)
    watch, own = Stopwatch(), CpuOperators(1)
    results = []
    for operators in (own, watched_operators(own, watch, 99)):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        out = operators.rms_norm(*leaves, 1e-6)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(map(torch.equal, *results))
    assert [row for row, _ in watch.seconds] == ["norm"]


def test_a_profile_stands_beside_the_measurement_and_stock_is_not_asked_for_strict_sums(
    config, capsys, monkeypatch
):
    monkeypatch.setenv(*STRICT_SUMS)
    result = bench_step(config)
    assert result["MKL_CBWR"] == {"aligned": STRICT_SUMS[1], "stock": USUAL_SUMS}
    (measured,) = result["by_num_tokens"]
    *rows, total = measured["profile"]
    for kind in KINDS:
        assert sum(row[kind]["seconds"] for row in rows) == pytest.approx(total[kind]["seconds"])
    printed = capsys.readouterr().err.splitlines()
    table = printed[printed.index("64 tokens") :]
    assert len(table) == 2 + len(measured["profile"])
    assert "profile" not in bench_step(replace(config, profile=False))["by_num_tokens"][0]
