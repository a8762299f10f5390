"""What a soak wrote down is read back as it was, under the versions that it ran with, or refused."""

import json

import pytest

from tests.support.soak_record import SoakRecord
from tests.support.train_runs import ROOT

OLD, NEW = {"torch": "2.12"}, {"torch": "2.13"}
KILL = {
    "number": 0, "hosts": 3, "ranks": 2, "engines": 1, "weight_sync": "disk", "rank_restarts": 1,
    "victim": "node", "which": 2, "phase": "push", "rollouts_done": 3, "after": 0.5, "struck": True,
    "exit_codes": [1, 0], "engine_restarts": 0, "left_behind": [], "hash_is_equal": True, "seconds": 9,
}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    """A record of one kill."""
    record = SoakRecord(tmp_path / "soak.json", 3, OLD)
    record.part["undisturbed"]["1"] = {"hash": "ab", "seconds": {"push": 0.5}}
    record.part["kills"].append(KILL)
    record.write()
    return record.file


def test_a_record_goes_on_under_its_versions_and_begins_a_part_under_others(file):
    same = SoakRecord(file, 3, OLD)
    assert same.part["kills"] == [KILL] and same.part["undisturbed"]["1"]["hash"] == "ab"
    other = SoakRecord(file, 3, NEW)
    assert other.part == {"versions": NEW, "undisturbed": {}, "kills": []}
    other.part["kills"].append({**KILL, "number": 1})
    other.write()
    again = SoakRecord(file, 3, NEW)
    assert [part["versions"] for part in again.soaked["parts"]] == [OLD, NEW]
    assert [kill["number"] for kill in again.kills] == [0, 1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"struck": 1}, r"parts\.0\.kills\.0\.struck=1"),
        ({"colour": "red"}, r"parts\.0\.kills\.0\.colour"),
        ({"number": 4}, r"have the numbers \[4\]"),
    ],
)
def test_a_file_of_another_shape_is_refused(file, change, told):
    soaked = json.loads(file.read_text())
    soaked["parts"][0]["kills"][0] |= change
    file.write_text(json.dumps(soaked))
    with pytest.raises(ValueError, match=told):
        SoakRecord(file, 3, OLD)


def test_the_kills_of_another_seed_are_not_gone_on_with(file):
    with pytest.raises(ValueError, match=r"--seed=4: .* has the kills of seed 3"):
        SoakRecord(file, 4, OLD)


def test_the_kills_of_runs_of_another_rank_are_not_gone_on_with(file):
    with pytest.raises(ValueError, match=r"--lora-rank=8: .* has runs of --lora-rank 0\."):
        SoakRecord(file, 3, OLD, lora_rank=8)


@pytest.mark.parametrize(("name", "lora_rank"), [("soak.json", 0), ("soak_lora.json", 8)])
def test_the_published_records_can_be_read(name, lora_rank):
    assert SoakRecord(ROOT / "benchmarks/results" / name, 0, {}, lora_rank).kills
