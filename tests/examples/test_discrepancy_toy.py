"""The one-state experiment, called from another directory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "discrepancy_toy" / "run.sh"


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    def run(*argv):
        elsewhere, work = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("work")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            [str(SCRIPT), *argv],
            env={**os.environ, "PATH": path, "WORK_DIR": str(work / "new")},
            cwd=elsewhere,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not list(elsewhere.iterdir())
        return done, work / "new"

    return run


WEIGHTED = ["--reading", "weighted", "--moved", "0.05", "--budget", "0.005"]


@pytest.fixture(scope="module", params=[[], WEIGHTED], ids=["unweighted", "weighted"])
def outcome(request, launch):
    done, work = launch(*request.param)
    assert done.returncode == 0, done.stderr
    assert (work / "toy.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((work / "toy.json").read_text())


def test_every_policy_is_on_the_simplex_and_spends_its_budget(outcome):
    for name, unit in [("moved", "moved"), ("own", "penalty")]:
        for measure in ("difference", "log", "ratio"):
            solution = outcome[name][measure]
            assert sum(solution["policy"]) == pytest.approx(1)
            assert min(solution["policy"]) >= 0
            assert solution[unit] == pytest.approx(outcome[name]["budget"], rel=1e-5)


def test_the_difference_seeks_the_tail_the_ratio_least_and_the_log_lies_between(outcome):
    at = outcome["moved"]
    for quantity in ("gained_in_tail", "lucky"):
        assert at["difference"][quantity] > at["log"][quantity] > at["ratio"][quantity]
    assert at["difference"]["gained_in_tail"] > 10 * at["log"]["gained_in_tail"]
    assert at["difference"]["gained_in_tail"] > at["budget"] / 2


def test_a_budget_that_cannot_be_spent_is_said_in_one_line(launch):
    done, work = launch("--reading", "weighted", "--budget", "9")
    assert done.returncode == 2
    assert "never active. Lower it." in done.stderr.splitlines()[-1]
    assert not work.exists()
