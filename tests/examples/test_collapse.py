"""The collapse: its inputs, its records and the page made of them, and a run of two rollouts."""

import json
import os
import random
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest

from onpolicy.algorithm.estimators import group_advantages

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "collapse"


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The example's scripts import each other as neighbours."""
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


def test_every_second_problem_is_solvable_by_running_sums_and_no_other(tmp_path):
    import make_inputs

    make_inputs.write_problems(tmp_path / "data.jsonl", 100, random.Random(0))
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        values = [int(digit) for digit in row["prompt"].removesuffix("=")]
        sums = "".join(str(s % 10) for s in accumulate(values))
        assert len(values) == make_inputs.DIGITS
        assert (values[0] < 5) == (i % 2 == 0) == (row["label"] == sums)


@pytest.mark.parametrize("b", [-0.5, 0.0, 0.5])
def test_unsolvable_prompts_have_the_advantage_that_is_given_and_others_are_compared(b):
    import advantages
    import make_inputs

    def rewards(label, *responses):
        samples = [
            SimpleNamespace(prompt=SimpleNamespace(label=label), response=r) for r in responses
        ]
        pairs = zip(advantages.compared(samples), advantages.unsolvable(samples), strict=True)
        return [compared + b * unsolvable for compared, unsolvable in pairs]

    groups = [rewards("013", "013", "014"), rewards(make_inputs.UNREACHABLE, "013", "014")]
    assert group_advantages(groups, "reinforce") == [[0.5, -0.5], [b, b]]
    assert group_advantages(groups, "dr_grpo") == [[0.5, -0.5], [0.0, 0.0]]


def curves_of(rewards, **more):
    zeros = [0.0] * len(rewards)
    named = ("k3", "gradient_norm", "entropy", "truncated")
    return {"reward": rewards, **dict.fromkeys(named, zeros), **more}


@pytest.mark.parametrize(
    ("rewards", "collapsed"),
    [
        ([0.4] * 40, False),
        ([0.8] * 40 + [0.41] * 40, False),
        ([0.8] * 40 + [0.39] * 40, True),
        ([0.1] * 40 + [0.8] * 2 + [0.1] * 40, False),  # two rollouts are no peak
    ],
)
def test_a_run_that_ends_below_half_of_its_peak_has_collapsed(rewards, collapsed):
    import records

    assert records.summary(curves_of(rewards))["collapsed"] == collapsed


def test_the_plan_has_every_run_once_and_what_was_recorded_is_in_it():
    import study

    names = [run.name for run in study.plan()]
    assert len(set(names)) == len(names)
    assert {file.stem for file in study.RESULTS.glob("*.json")} <= set(names)
    assert {run.arm for run in study.plan()} == {f.stem for f in (EXAMPLE / "arms").iterdir()}


def test_the_pages_table_is_that_of_the_records():
    import tables

    results, summary = (page.read_text() for page in tables.PAGES)
    # One of the five is the table of benchmarks.smollm2_drift.
    assert [results.count(": begin -->"), summary.count(": begin -->")] == [5, 1]
    for page in (results, summary):
        assert tables.with_tables(page) == page, "call examples/collapse/tables.py"


def test_the_picture_has_runs_whose_samples_lag_and_so_have_no_k3(tmp_path):
    import picture
    import study

    records = ("int3-nothing-0", "bf16-stale-lag_1-0")
    picture.main(str(tmp_path / "p.png"), *(f"{x}={study.RESULTS / x}.json" for x in records))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_permutation_test_counts_every_way_to_share_out_the_runs():
    from significance import exact_p, holm

    assert exact_p([2.0, 2.1, 2.2], [0.0, 0.1, 0.2]) == 2 / 20  # both ways round, of 6 over 3
    assert exact_p([1.0, 2.0], [1.0, 2.0]) == 1
    assert exact_p([0.0, 3.0], [1.0, 2.0]) == 1
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]


def test_definitions_of_a_collapse_differ_where_they_should():
    from significance import ALIGNED, collapses

    aligned = [curves_of([0.5] * 20 + [1.0] * 40)] * 5
    kinds = {
        "faded": curves_of([0.3] * 20 + [0.8] * 20 + [0.35] * 20),
        "sank": curves_of([0.6] * 20 + [0.8] * 20 + [0.55] * 20),
    }
    rows = collapses({ALIGNED: aligned, **{("int3", k): [c] * 5 for k, c in kinds.items()}})
    assert [row[2:] for row in rows] == [
        ["0 of 5"] * 3, ["5 of 5", "0 of 5", "5 of 5"], ["0 of 5", "5 of 5", "0 of 5"],
    ]  # fmt: skip


def test_an_alarm_counts_its_lead_before_a_collapse_and_rings_in_vain_in_a_run_without_one():
    from alarms import beyond, collapse, judged, surge

    fell = [0.8] * 30 + [0.0] * 30
    assert collapse(curves_of(fell)) == 40 and collapse(curves_of([0.8] * 60)) is None
    warned = [1.0] * 10 + [0.9] + [1.0] * 5 + [0.9] * 44
    low = beyond("ess", lambda ess: ess < 0.95)
    assert low(curves_of(fell, ess=warned)) == 17, "one rollout is not two in a row"
    runs = [
        curves_of(fell, ess=warned),
        curves_of(fell, ess=[1.0] * 45 + [0.5] * 15),  # too late
        curves_of([0.8] * 60, ess=warned),
        curves_of([0.8] * 60, ess=[1.0] * 60),
    ]
    assert judged(low, runs) == ["1 of 2", "23 (23 to 23)", "1 of 2"]
    zeros = [0.0] * 60
    assert surge(curves_of(fell, length=[100.0] * 60, truncated=zeros)) is None
    assert surge(curves_of(fell, length=[100.0] * 30 + [400.0] * 30, truncated=zeros)) is not None


def test_a_run_whose_samples_lag_has_no_k3_and_counts_for_no_alarm_that_reads_it():
    import alarms
    import tables
    from records import summary

    rest = {"ess": [1.0] * 60, "length": [100.0] * 60}
    compared = curves_of([0.8] * 60, **rest) | {"k3": [0.01] * 60}
    lagged = {name: curve for name, curve in compared.items() if name != "k3"}
    rows = {name: cells for name, _, *cells in alarms.rows({"int3": [compared, lagged]})}
    assert rows["k3 above 0.001"] == ["0 of 0", "-", "1 of 1"]
    assert rows["ESS below 0.95"] == ["0 of 0", "-", "0 of 2"]
    ends = [[summary(run)[key] for run in (compared, lagged)] for key in ("k3_first", "k3_last")]
    assert ends == [[0.01, None]] * 2 and tables.k3_cell(*ends) == "-"
    assert tables.k3_cell([0.01], [0.02]) == "1e-02 / 2e-02" and tables.k3_cell([0.0], [0.0]) == "0"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """What train.sh would make first, of a model that has learnt for two steps."""
    import make_inputs

    work = tmp_path_factory.mktemp("collapse")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_inputs, "STEPS", 2)
        make_inputs.main(work / "inputs")
    return work


@pytest.mark.runs
@pytest.mark.engine
def test_it_ends_with_a_picture_of_its_runs(inputs):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [EXAMPLE / "run.sh", "tis_token"],
        env={**os.environ, "PATH": path, "WORK_DIR": str(inputs), "NUM_ROLLOUT": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (inputs / "collapse.png").read_bytes().startswith(b"\x89PNG")
    import records

    curves = records.read_curves(inputs / "int3-tis_token")
    assert min(curves["k3"]) > 0 and min(curves["ess"]) < 1


def test_the_control_of_masks_leaves_out_whole_answers_by_the_seed_and_half_of_them():
    import half_at_random
    import torch

    def kept(seed):
        half_at_random.random_of.cache_clear()
        lens = [3] * 1000
        loss, _, metrics = half_at_random.half(
            SimpleNamespace(seed=seed), pg_loss=torch.full((3000,), -2.0), loss_masks=[],
            response_lengths=lens,
        )  # fmt: skip
        assert torch.equal(loss, -2 * metrics["kept"])
        return metrics["kept"].view(1000, 3)

    found = kept(0)
    assert 450 < found[:, 0].sum() < 550 and (found == found[:, :1]).all()
    assert torch.equal(found, kept(0)) and not torch.equal(found, kept(1))
