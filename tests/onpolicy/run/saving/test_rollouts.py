"""rollouts.json is taken as it was written, or refused by name: never half, and never by a traceback."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.errors import ConfigError
from onpolicy.run.run import Run
from onpolicy.run.saving.rollouts import FILE, read_rollouts, write_rollouts
from tests.support.changed_json import changes
from tests.support.run_in_memory import run_in_memory

SCHEDULES = {
    "lag": {"rollout_lag": 1},
    "free": {"rollout_schedule": "free", "over_sampling_batch_size": 9, "max_staleness": 2},
}


@pytest.fixture(scope="module", params=SCHEDULES)
def drawn(request, tmp_path_factory, one_process):
    """A run that draws ahead, and what one of its checkpoints holds of that: groups or open ones."""
    runs = []

    class Kept(Run):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            runs.append(self)

    directory = tmp_path_factory.mktemp("ahead")
    values = {"num_rollout": 3, "save": str(directory / "save"), "save_interval": 1}
    run_in_memory(directory, make_run=Kept, **values, **SCHEDULES[request.param])
    records = [json.loads(f.read_text()) for f in sorted((directory / "save").rglob(FILE))]
    record = next(r for r in records if r["drawn" if request.param == "lag" else "open"])
    return runs[0], record, directory / "again"


def read(drawn, record):
    run, _, directory = drawn
    directory.mkdir(exist_ok=True)
    (directory / FILE).write_text(json.dumps(record))
    run.rollouts.drawn.clear()
    read_rollouts(directory, run.sampler, run.rollouts)


def test_what_was_written_is_read_and_written_again(drawn):
    run, record, directory = drawn
    read(drawn, record)
    write_rollouts(directory, run.sampler, run.rollouts)
    assert json.loads((directory / FILE).read_text()) == record


@given(data=st.data())
def test_another_shape_is_refused_by_name_with_the_remedy(drawn, data):
    steps = [*drawn[1]["drawn"]]
    kept = ("metrics", "reward_parts", "info", "observations", *(("drawn", s, 1) for s in steps))
    record = data.draw(changes(drawn[1], kept, optional=steps, nullable=[("open", "samples")]))
    with pytest.raises(ConfigError, match=rf"^--load=.*: {FILE}: .*earlier checkpoint"):
        read(drawn, record)


def of_first_trajectory(record, **fields):
    record = json.loads(json.dumps(record))
    groups = [g for each in record["drawn"].values() for g in each[0]]
    trajectories = [s["trajectory"] for g in groups for s in g["samples"]]
    trajectories += [
        branch
        for group in record["open"]
        for episode in group["episodes"]
        for branch in episode["branches"]
        if branch["sampled"]
    ]
    trajectories[0].update(fields)
    return record


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"sampled": [True]}, "sampled=[True]: must be"),
        ({"rollout_log_probs": []}, "rollout_log_probs 0: a token has one"),
        ({"routed_experts": [1, 1, "!"]}, "Only base64 data"),
        (
            {"finish_reason": "bored"},
            "finish_reason='bored': should be 'stop', 'length' or 'abort'",
        ),
        ({"spans": [{"version": 0, "start": 0, "end": 99}]}, "must end after it starts, by"),
        ({"spans": [{"version": "0", "start": 0, "end": 1}]}, "spans.0.version='0': should be a v"),
        ({"routed_experts": ["a", 1, ""]}, "routed_experts.0='a': should be a valid integer"),
    ],
)
def test_what_no_run_has_drawn_is_refused(drawn, fields, fault):
    with pytest.raises(ConfigError, match=re.escape(fault)):
        read(drawn, of_first_trajectory(drawn[1], **fields))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '"x"'])
def test_a_file_that_is_no_record_is_refused(drawn, text):
    run, _, directory = drawn
    directory.mkdir(exist_ok=True)
    (directory / FILE).write_text(text)
    with pytest.raises(ConfigError, match=rf"^--load=.*: {FILE}: "):
        read_rollouts(directory, run.sampler, run.rollouts)
