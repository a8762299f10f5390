import pytest

from onpolicy.rollout.statistics import idle_shares


@pytest.mark.parametrize(
    ("seconds", "rollout", "trainer"),
    [
        ({"rollout_time": 6.0, "train_time": 2.0}, 0.2, 0.6),
        ({"rollout_time": 8.0}, 0.0, 0.8),  # nothing to learn from
        ({"rollout_time": 8.5, "train_time": 0.5}, 0.0, 0.75),  # what was measured apart adds up
    ],
)
def test_a_side_is_idle_while_it_neither_computes_nor_takes_part_in_a_push(
    seconds, rollout, trainer
):
    metrics = {"step_time": 10.0, "weight_sync_time": 1.5, "probe_time": 0.5, **seconds}
    shares = idle_shares({f"perf/{name}": value for name, value in metrics.items()})
    assert shares == {
        "perf/rollout_idle_share": pytest.approx(rollout),
        "perf/trainer_idle_share": pytest.approx(trainer),
    }
