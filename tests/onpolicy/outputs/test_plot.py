"""The picture of a run: whatever was logged can be seen."""

import json
import math

import matplotlib.pyplot as plt
import pytest

from onpolicy.outputs.plot import plot_run

NAN, INF = math.nan, math.inf


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws records, and returns the axes of the picture."""

    def draw(records):
        monkeypatch.setattr(plt, "close", lambda figure: None)
        file = tmp_path / "metrics.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        plot_run(file, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        axes = plt.gcf().axes
        monkeypatch.undo()
        plt.close(plt.gcf())
        return axes

    return draw


def rollouts(*rewards):
    return [{"step": i, "rollout/raw_reward": reward} for i, reward in enumerate(rewards)]


def evaluations(**values):
    return [{"step": 7, f"eval/{name}/avg@4": value} for name, value in values.items()]


def is_in_sight(axis, x, y):
    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    return left <= x <= right and low <= y <= high


@pytest.mark.parametrize(
    "records",
    [
        rollouts(-1.0, -0.5, -0.75),  # as `dapo` scores
        rollouts(-1.0, -1.0, -1.0),
        rollouts(0.0, 0.0),
        rollouts(-0.5),
        rollouts(0.25, NAN, 0.5, INF, -INF, 0.75),
        rollouts(-1.0, 1e9),
        rollouts(0.5, 0.75) + evaluations(aime=-0.75, math=3.0),
        [{"step": 0, "eval/avg@4": 0.1}],
    ],
)
def test_every_reward_is_in_sight(drawn, records):
    axis = drawn(records)[0]
    logged = [(r["step"], v) for r in records for k, v in r.items() if k != "step"]
    shown = [xy for line in axis.lines for xy in zip(*line.get_data(), strict=True)]
    for x, y in logged:
        if math.isfinite(y):
            assert (x, y) in shown and is_in_sight(axis, x, y)


def test_no_mismatch_is_a_line_at_zero_and_not_the_edge_of_the_picture(drawn):
    records = [{"step": i, "parity/num_mismatched_tokens": 0} for i in range(3)]
    low, high = drawn(records)[2].get_ylim()
    assert low < 0 and high >= 1


@pytest.mark.parametrize("records", [[], rollouts(NAN, NAN)])
def test_where_there_is_nothing_to_see_it_says_so(drawn, records):
    assert all([text.get_text() for text in axis.texts] == ["no values"] for axis in drawn(records))


def test_the_evaluations_are_named_beside_the_training_reward(drawn):
    axis = drawn(rollouts(0.5) + evaluations(aime=0.25, math=0.75))[0]
    names = [text.get_text() for text in axis.get_legend().get_texts()]
    assert names == ["rollout/raw_reward", "eval/aime/avg@4", "eval/math/avg@4"]
