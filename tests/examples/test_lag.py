"""The runs by lag: what is planned is valid, and the page says what is recorded."""

import json
import sys
from pathlib import Path

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "lag"
GIVEN = ["--hf-checkpoint", "/m", "--prompt-data", "/d", "--eval-prompt-data", "/e"]


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The example's scripts import each other as neighbours."""
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


def test_every_run_of_the_plan_is_valid_and_another_one():
    import learning

    quickstart = str(ROOT / "examples" / "quickstart" / "config.yaml")
    runs, configs = list(learning.plan()), set()
    for run in runs:
        config = parse(TrainConfig, [*GIVEN, "--custom-config-path", quickstart, *run.flags], "x")
        validate(config)
        configs.add(repr(config))
    assert len(configs) == len({run.name for run in runs}) == len(runs)


def test_a_curve_has_no_value_where_no_token_has_its_lag(tmp_path):
    import learning

    steps = [{"step": i, "rollout/raw_reward": 0.25} for i in range(3)]
    steps[2] |= {"lag/2/k3": 0.125, "perf/step_time": 1.0}
    lines = [json.dumps(step) for step in [*steps, {"step": 3, "eval/reward": 1.0}]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert learning.read_curves(tmp_path) == {
        "rollout/raw_reward": [0.25] * 3,
        "lag/2/k3": [None, None, 0.125],
    }


def test_what_was_recorded_is_in_the_plan_with_its_command_and_no_token_mismatched():
    import learning
    import page

    runs = {run.name: run for run in learning.plan()}
    for name, record in page.read_records(learning.RECORDS).items():
        # Corrected was the default when the runs were made.
        assert record["command"] == " ".join(runs[name].command).removesuffix(" --use-tis")
        assert record["mismatched_tokens"] == 0


def test_the_pages_table_is_that_of_the_records():
    import page

    text = page.PAGE.read_text()
    assert page.with_table(text) == text, "call examples/lag/page.py"
