"""Which checkpoint is the best, and that it is kept."""

import os

import pytest

from onpolicy.config.groups import OutputConfig
from onpolicy.run.saving import Best, better
from onpolicy.run.saving.checkpoint import read
from tests.support.run_in_memory import run_in_memory

pytestmark = pytest.mark.usefixtures("undrawn")

METRIC = "eval/hard/avg@1"


def bests(save, values, mode="max"):
    """The rollouts done of the best, after each of the evaluations by their step."""
    output = OutputConfig(save=str(save), save_best_metric=METRIC, save_best_mode=mode)
    best, found = None, []
    for step, value in values.items():
        best = better(output, best, step, {METRIC: value, "eval/hard/response_length": 1.0})
        found.append(best and best.rollouts_done)
    return found


@pytest.fixture
def save(tmp_path):
    for step in (2, 4, 6, 8):
        (tmp_path / f"step_{step:06d}").mkdir()
    return tmp_path


def test_the_best_is_the_first_of_the_largest_or_smallest_that_was_saved(save):
    values = {0: 9.0, 2: 0.5, 3: 0.9, 4: 0.5, 6: 0.75, 8: 0.25}
    assert bests(save, values) == [None, 2, 2, 2, 6, 6]
    assert os.readlink(save / "best") == "step_000006"
    assert bests(save, values, mode="min") == [None, 2, 2, 2, 2, 8]
    assert os.readlink(save / "best") == "step_000008"


def test_a_link_that_was_half_made_is_made_anew(save):
    (save / ".partial_best").symlink_to("step_000002")
    bests(save, {4: 1.0})
    assert os.readlink(save / "best") == "step_000004"


def test_an_evaluation_without_the_metric_chooses_nothing_and_says_so(save, caplog):
    output = OutputConfig(save=str(save), save_best_metric="eval/hard/maj@4")
    best = Best(rollouts_done=2, value=0.5)
    assert better(output, best, 4, {"eval/easy/avg@4": 1.0}) == best
    assert not caplog.records
    assert better(output, best, 4, {"eval/hard/avg@4": 1.0}) == best
    assert "--save-best-metric=eval/hard/maj@4: step 4 has none" in caplog.text
    assert not (save / "best").is_symlink()


class Stopped(Exception):
    pass


def test_the_best_outlives_newer_ones_and_a_run_that_goes_on_knows_it(tmp_path):
    is_first = True

    def reward(sample):
        if is_first and sample.weight_version == 3:
            raise Stopped
        return {1: 0.5, 2: 0.75}.get(sample.weight_version, 0.25)

    save = tmp_path / "save"
    values = {
        "eval_interval": 1, "save": str(save), "save_interval": 1, "keep_checkpoints": 1,
        "load": str(save), "save_best_metric": METRIC, "num_rollout": 4,
    }  # fmt: skip
    with pytest.raises(Stopped):
        run_in_memory(tmp_path, reward=reward, **values)
    assert os.readlink(save / "best") == "step_000002"
    is_first = False
    run_in_memory(tmp_path, reward=reward, **values)
    assert sorted(path.name for path in save.glob("step_*")) == ["step_000002", "step_000004"]
    assert os.readlink(save / "best") == "step_000002"
    assert read(save / "best").state.rollouts_done == 2
    assert read(save / "step_000004").state.best == Best(rollouts_done=2, value=0.75)
