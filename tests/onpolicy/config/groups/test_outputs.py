"""--eval-prompt-data: one path, or slime's and Miles' pairs."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.config.groups.outputs import eval_sets
from onpolicy.errors import ConfigError


def given(*argv):
    return parse(TrainConfig, argv, "onpolicy train").eval.sets


def test_a_single_path_has_no_name():
    assert given() == {}
    assert given("--eval-prompt-data", "/d/aime.jsonl") == {"": "/d/aime.jsonl"}


def test_pairs_of_names_and_paths_are_sets():
    argv = ["--eval-prompt-data", "aime", "/d/a.jsonl", "math-500", "b.parquet", "--seed", "1"]
    assert given(*argv) == {"aime": "/d/a.jsonl", "math-500": "b.parquet"}


@pytest.mark.parametrize("value", ["/d/a.jsonl", "[/d/a.jsonl]"])
def test_a_yaml_file_may_hold_a_path_or_a_list(value, tmp_path):
    (tmp_path / "c.yaml").write_text(f"eval_prompt_data: {value}\n")
    assert given("--custom-config-path", str(tmp_path / "c.yaml")) == {"": "/d/a.jsonl"}
    (tmp_path / "c.yaml").write_text("eval_prompt_data: [aime, a.jsonl, math, b.jsonl]\n")
    assert list(given("--custom-config-path", str(tmp_path / "c.yaml"))) == ["aime", "math"]


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        (["aime", "a.jsonl", "math"], "3 values are neither one path nor names"),
        (["a.jsonl", "b.jsonl"], "'a.jsonl' stands where the name of a set is expected"),
        (["data/a", "b.jsonl"], "'data/a' stands where the name"),
        (["aime", "a.jsonl", "aime", "b.jsonl"], "two sets have the same name"),
    ],
)
def test_anything_else_is_refused_with_the_way_to_give_them(values, rule):
    with pytest.raises(ConfigError, match=rule) as error:
        eval_sets(values)
    assert str(error.value).startswith(f"--eval-prompt-data={' '.join(values)}: ")
    assert "Give one path, or: name path [name path ...]" in str(error.value)
