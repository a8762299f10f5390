"""A journal is taken as a run wrote it, or refused by name."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.errors import ConfigError
from onpolicy.outputs import recorded_order
from tests.support.changed_json import changes

START = {"step": 0, "config": {"seed": 0}, "prompts": "a"}
STEP = {
    "step": 1,
    "weights": "b",
    "groups": [
        {"number": 0, "samples": [{"spans": [[0, 2], [1, 1]], "tokens": "c"}], "branches": None}
    ],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("journal") / "rollouts.jsonl"


def read(file, *records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return recorded_order.read(str(file))


def test_what_a_run_wrote_is_read(file):
    assert read(file, START, STEP).spans() == {(0, 0): {(): [(0, 2), (1, 1)]}}


def test_branches_of_episodes_are_read_whatever_was_learnt_of_them(file):
    fork = {"key": ["0", "a"], "spans": [[1, 3]]}
    group = {"number": 4, "samples": [], "branches": [[], [{"key": [], "spans": [[0, 1]]}, fork]]}
    read_again = read(file, START, {**STEP, "groups": [group]}).spans()
    assert read_again == {(4, 0): {}, (4, 1): {(): [(0, 1)], ("0", "a"): [(1, 3)]}}


@given(data=st.data(), which=st.sampled_from([0, 1]))
def test_another_shape_is_refused_by_name(file, data, which):
    records = [START, STEP]
    records[which] = data.draw(changes(records[which], kept=("config",)))
    with pytest.raises(ConfigError, match=r"^--replay=.*rollouts\.jsonl: .* (G|g)ive the "):
        read(file, *records)
