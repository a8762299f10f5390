"""Runs whose engines sample ahead: the schedule decides every bit, and no clock does."""

import dataclasses
import json
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.errors import EngineError
from onpolicy.run.drawing import Schedule
from onpolicy.run.run import Run
from tests.support.engines_in_memory import Engine, Host
from tests.support.kept_runs import Keeps, require_weights_of_spans
from tests.support.run_in_memory import (
    GOVERNED,
    Interrupted,
    even_tokens,
    interrupted_at,
    records_of,
    run_in_memory,
)
from tests.support.tiny_policy import ALIGNED, STOCK

pytestmark = pytest.mark.usefixtures("one_process")

ROLLOUTS = 6
FREE = {"free": {"rollout_schedule": "free"}}
PER_ROLLOUT = 3 * 4

MODES = {
    "lag 1": {"rollout_lag": 1},
    "lag 3": {"rollout_lag": 3},
    "dynamic": {"dynamic_sampling": True, "over_sampling_batch_size": 2},
    "lag 2, dynamic": {"rollout_lag": 2, "dynamic_sampling": True},
}


def whole_or_half(sample):
    """A reward that all samples of many groups share."""
    return float(even_tokens(sample) >= 0.75)


def run(directory, mode, host=None, make_run=Keeps, **more):
    values = {"num_rollout": ROLLOUTS, **{**MODES, **FREE}.get(mode, {}), **more}
    return run_in_memory(
        directory, host, reward=whole_or_half, make_run=make_run, eval_sets={}, **values
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """An undisturbed run of a mode: its directory and its summary."""
    runs = {}

    def of(mode):
        if mode not in runs:
            directory = tmp_path_factory.mktemp("plain")
            runs[mode] = directory, run(directory, mode)
        return runs[mode]

    return of


def same(summary, other):
    return dataclasses.replace(summary, run_dir="") == dataclasses.replace(other, run_dir="")


@pytest.mark.parametrize("mode", MODES)
def test_every_token_is_of_the_weights_that_its_span_says(tmp_path, mode):
    run(tmp_path, mode)
    require_weights_of_spans(Keeps.last)
    lags = {
        step - int(span.version)
        for step, groups in Keeps.last.trained.items()
        for sample in (s for group in groups for s in group.samples)
        for span in sample.trajectory.spans
    }
    least = MODES[mode].get("rollout_lag", 0)
    assert min(lags) >= 0 and max(lags) == least


@settings(settings.get_profile("few"))
@given(
    st.sampled_from(sorted(MODES)),
    st.lists(st.sets(st.integers(3, 90), max_size=3), min_size=1, max_size=3),
    st.integers(0, 10**6),
)
def test_neither_clocks_nor_engines_nor_their_deaths_change_a_bit(
    plain, tmp_path_factory, mode, dies_at, seed
):
    chance = random.Random(seed)
    host = Host(*dies_at)
    host.pause = lambda: chance.random() * 1e-3 * (chance.random() < 0.1)

    class Slow(Run):
        def train(self, groups, step):
            time.sleep(chance.random() * 0.02)
            return super().train(groups, step)

    deaths = {
        "rollout_num_engines": len(dies_at), "rollout_max_restarts": sum(map(len, dies_at)),
    }  # fmt: skip
    summary = run(tmp_path_factory.mktemp("run"), mode, host, Slow, **deaths)
    assert summary.run_hash == plain(mode)[1].run_hash


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("step", "save_interval"), [(1, 1), (3, 1), (4, 2)])
def test_a_resumed_run_goes_on_to_the_same_bits(plain, tmp_path, mode, step, save_interval):
    save = str(tmp_path / "save")
    values = {"save": save, "load": save, "save_interval": save_interval}
    with pytest.raises(Interrupted):
        run(tmp_path, mode, make_run=interrupted_at(step), **values)
    resumed = run(tmp_path, mode, **values)
    directory, straight = plain(mode)
    assert same(resumed, straight)
    assert records_of(tmp_path) == records_of(directory)


def test_engines_sample_the_next_rollout_while_the_trainer_learns(tmp_path):
    """They get on with it however long the training takes."""
    host = Host()

    class Waits(Run):
        def train(self, groups, step):
            deadline = time.monotonic() + 60
            while step < ROLLOUTS - 1 and sum(host.answered.values()) < self.wanted(step):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            return super().train(groups, step)

        def wanted(self, step):
            return (step + 2) * PER_ROLLOUT + (step + 1) * 4  # and the probes

    run(tmp_path, "lag 1", host, Waits)


class Stale(Engine):
    """Samples one response under the weights of the push before, and says so."""

    before, left = None, 1

    def post(self, path, body, num_bytes=0):
        if path == "/update_weights_from_disk" and self.memory is not None:
            weights = {name: table.clone() for name, table in self.memory.weights.items()}
            self.before = weights, self.memory.version
        return super().post(path, body, num_bytes)

    async def generate(self, session, request, takes_parts=False):
        if self.calls < 40 or not self.left or self.before is None:
            return await super().generate(session, request, takes_parts)
        self.left -= 1
        memory = self.memory
        now = memory.weights, memory.version
        memory.weights, memory.version = self.before
        try:
            return await super().generate(session, request, takes_parts)
        finally:
            memory.weights, memory.version = now


@pytest.mark.parametrize("mode", [*MODES, "free"])
def test_an_engine_that_samples_one_response_under_the_wrong_version_is_found(
    tmp_path, monkeypatch, mode
):
    monkeypatch.setattr("tests.support.engines_in_memory.Engine", Stale)
    with pytest.raises(EngineError, match=r"weight_version=-?\d+ on a response"):
        run(tmp_path, mode)


def test_spans_are_part_of_the_hash(tmp_path):
    """Two runs that sample and learn the same, but say another version, are not the same."""
    one = run(tmp_path / "one", "lag 1", lr=0.0)
    two = run(tmp_path / "two", "lag 3", lr=0.0)
    none = run(tmp_path / "none", "", lr=0.0)
    assert len({one.run_hash, two.run_hash, none.run_hash}) == 3


def test_a_run_that_fails_while_it_draws_ahead_says_why_and_ends_its_engines(tmp_path):
    host = Host(range(40, 999))
    with pytest.raises(EngineError, match="used up"):
        run(tmp_path, "lag 1", host)
    assert not any(engine.is_running for engine in host.engines)


def test_what_is_being_drawn_ends_with_the_run(tmp_path):
    host = Host()
    host.pause = lambda: 0.0 if sum(host.answered.values()) < 20 else 0.05

    class Fails(Run):
        def train(self, groups, step):
            raise Interrupted

    with pytest.raises(Interrupted):
        run(tmp_path, "lag 3", host, Fails)
    assert not any(engine.is_running for engine in host.engines)
    assert host.num_restarts == 0
    assert not list((tmp_path / "run").glob(".weights_*"))


def test_dynamic_sampling_trains_on_groups_with_a_signal_in_the_order_of_the_prompts(tmp_path):
    run(tmp_path, "dynamic")
    assert any(record["rollout/num_resampled_groups"] for record in records_of(tmp_path))
    for groups in Keeps.last.trained.values():
        assert len(groups) == 3
        assert all(len({sample.reward for sample in group.samples}) > 1 for group in groups)


@pytest.mark.parametrize("mode", [mode for mode in MODES if "lag" in mode])
@pytest.mark.parametrize("weight_sync", ["disk", "tensor"])
def test_an_engine_that_dies_after_the_trainer_went_on_gets_the_weights_that_it_had(
    plain, tmp_path, mode, weight_sync
):
    host, slow = Host(), threading.Event()
    host.pause = lambda: 0.05 if slow.is_set() else 0.0

    class Kills(Run):
        def roll_out(self, step):
            if step == 2:
                slow.set()
            return super().roll_out(step)

        def train(self, groups, step):
            metrics = super().train(groups, step)
            if step == 2:
                host.engines[0].memory = None
                slow.clear()
            return metrics

    summary = run(tmp_path, mode, host, Kills, weight_sync=weight_sync)
    assert host.num_restarts == 1
    assert summary.run_hash == plain(mode)[1].run_hash


def test_the_governor_changes_the_engines_when_they_draw_nothing(tmp_path):
    seen = []

    class Watched(Keeps):
        def _climb(self):
            seen.append(getattr(self, "rollouts", None) and self.rollouts._thread)
            super()._climb()

    host = Host()
    run(tmp_path, "lag 1", host, Watched, **GOVERNED)
    moves = [
        json.loads(line) for line in (tmp_path / "run/governor.jsonl").read_text().splitlines()
    ]
    assert [(move["step"], move["to"]) for move in moves] == [
        (0, "tis"), (1, "mis"), (2, "decay"), (3, "aligned"),
    ]  # fmt: skip
    assert seen == [None] * 5  # before the run, and at each move
    assert [engine.spec.contract for engine in host.engines] == [STOCK, ALIGNED]
    apart = [record["probe/k3"] for record in records_of(tmp_path)]
    assert min(apart[:3]) > 0 and apart[3:] == [0] * (ROLLOUTS - 3)


def test_what_was_drawn_before_a_move_is_trained_on_as_the_schedule_says(tmp_path):
    """The step after the servers were started again has tokens of the old ones, and of these alone."""
    run(tmp_path, "lag 1", **GOVERNED)
    lags = {
        step: {step - int(s.version) for g in groups for x in g.samples for s in x.trajectory.spans}
        for step, groups in Keeps.last.trained.items()
    }
    assert all(min(lags[step]) == 1 for step in range(1, ROLLOUTS))


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_governed_run_that_is_resumed_goes_on_to_the_same_bits(tmp_path, step):
    broken = tmp_path / "broken"
    saves = {"save": str(broken / "save"), "load": str(broken / "save"), "save_interval": 1}
    with pytest.raises(Interrupted):
        run(broken, "lag 1", make_run=interrupted_at(step), **saves, **GOVERNED)
    resumed = run(broken, "lag 1", **saves, **GOVERNED)
    assert same(resumed, run(tmp_path / "whole", "lag 1", **GOVERNED))


schedules = st.builds(
    lambda lag, first, more: Schedule(lag=lag, first=first, last=first + more),
    st.integers(0, 5), st.integers(0, 4), st.integers(1, 12),
)  # fmt: skip


@given(schedules)
def test_every_step_is_drawn_once_and_under_the_version_that_is_said(schedule):
    drawn = [
        (step, version)
        for version in range(schedule.first, schedule.last)
        for step in schedule.drawn_under(version)
    ]
    assert drawn == [(s, schedule.version_of(s)) for s in range(schedule.first, schedule.last)]


@given(schedules)
def test_a_step_is_drawn_before_it_is_trained_on_and_lags_by_no_more_than_is_asked_for(schedule):
    for step in range(schedule.first, schedule.last):
        version = schedule.version_of(step)
        assert version == max(schedule.first, step - schedule.lag)
