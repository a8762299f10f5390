import csv
import json

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from onpolicy.errors import ConfigError
from onpolicy.rollout.data_files import read_rows

ROWS = [
    {"prompt": "a, \u00e9", "label": "007", "more": {"x": [1, 2]}},
    {"prompt": 'b "c"\nd', "label": "2", "more": {"x": []}},
]
TEXTS = [{name: row[name] for name in ("prompt", "label")} for row in ROWS]


def rows_of(path):
    return [row for _, row in read_rows(path, "--prompt-data=x")]


def write_csv(file):
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, TEXTS[0])
        writer.writeheader()
        writer.writerows(TEXTS)


def write_arrow_file(file):
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "array.json": lambda file: file.write_text(json.dumps(ROWS)),
    "lines.json": lambda file: file.write_text("".join(json.dumps(r) + "\n" for r in ROWS)),
    "lines.jsonl": lambda file: file.write_text("".join(json.dumps(r) + "\n" for r in ROWS)),
    "table.parquet": lambda file: Dataset.from_list(ROWS).to_parquet(str(file)),
    "saved": lambda file: Dataset.from_list(ROWS).save_to_disk(str(file), num_shards=2),
    "table.arrow": write_arrow_file,
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_rows_of_every_kind_of_file_are_those_that_were_written(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert rows_of(tmp_path / name) == ROWS


def test_the_stream_that_datasets_writes_is_read_alone(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    assert rows_of(file) == ROWS


def test_fields_of_csv_are_text(tmp_path):
    write_csv(tmp_path / "a.csv")
    assert rows_of(tmp_path / "a.csv") == TEXTS


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[1]", "row 1 is 1. Every row must be an object"),
        ("a.json", "[{]", "not valid JSON"),
        ("a.json", "3", "x:1: int. Every line"),
        ("a.csv", "prompt,label\na,b,c\n", "row 1 has more fields, or fewer"),
        ("a.csv", "prompt,label\na\n", "row 1 has more fields, or fewer"),
        ("a.csv", 'prompt,label\n"a"b,c\n', "cannot be read"),
        ("a.arrow", "no table", "cannot be read"),
        ("a.txt", "", "unknown kind '.txt'. Known: .jsonl, .json, .csv, .parquet, .arrow"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        rows_of(tmp_path / name)


def test_a_directory_must_be_one_split_of_a_saved_dataset(tmp_path):
    splits = DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS)})
    splits.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match=r"several splits \(train, test\)"):
        rows_of(tmp_path / "saved")
    assert rows_of(tmp_path / "saved" / "test") == ROWS
    with pytest.raises(ConfigError, match=r"a directory without state\.json"):
        rows_of(tmp_path)


ELSEWHERE = "/elsewhere.arrow"

WRONG_STATES = {
    "no files": ({}, "_data_files: is null"),
    "a number": ({"_data_files": 5}, "_data_files: is 5,"),
    "an object": ({"_data_files": {"filename": "a.arrow"}}, '_data_files: is {"filename"'),
    "names alone": ({"_data_files": ["x"]}, r'_data_files: is \["x"\]'),
    "an entry without a name": ({"_data_files": [{"name": "x"}]}, r"filename: is \[null\]"),
    "a number for a name": ({"_data_files": [{"filename": 3}]}, r"filename: is \[3\]"),
    "an absolute name": ({"_data_files": [{"filename": ELSEWHERE}]}, "filename='/elsewhere"),
    "a name above": ({"_data_files": [{"filename": "../x.arrow"}]}, r"filename='\.\./x.arrow'"),
    "a name below": ({"_data_files": [{"filename": "a/x.arrow"}]}, "filename='a/x.arrow'"),
    "the directory itself": ({"_data_files": [{"filename": "."}]}, r"filename='\.': must be"),
    "another kind of file": ({"_data_files": [{"filename": "x.json"}]}, "must be the name of an"),
    "a directory's name": ({"_data_files": [{"filename": "d.arrow"}]}, "d.arrow: is a directory"),
    "a NUL in a name": ({"_data_files": [{"filename": "\0.arrow"}]}, "cannot be read"),
    "no file of that name": ({"_data_files": [{"filename": "n.arrow"}]}, "n.arrow: cannot be read"),
}


@pytest.mark.parametrize(("state", "message"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_a_saved_data_set_names_files_of_its_own_directory_alone(tmp_path, state, message):
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "d.arrow").mkdir()
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "other"))
    (other,) = (tmp_path / "other").glob("*.arrow")
    other.rename(tmp_path / "x.arrow")  # what `../x.arrow` would read
    (saved / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=message):
        rows_of(saved)


@pytest.mark.parametrize("splits", [None, 5, "train", [1], {"train": 1}])
def test_splits_of_another_shape_are_said_to_be_that(tmp_path, splits):
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    with pytest.raises(ConfigError, match=r"dataset_dict.json: splits: is .*list of names"):
        rows_of(tmp_path)
