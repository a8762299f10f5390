"""The tokens that end a response: those of both files of a checkpoint, as published, and the user's."""

import json

import pytest

from onpolicy.models.hf_config import parse_config
from onpolicy.run.launch.stop_tokens import stop_token_ids
from tests.support.published import published, write_config


@pytest.mark.parametrize(
    ("name", "ends"),
    [("qwen3-0.6b", (3,)), ("gemma-2-2b-it", (1, 3)), ("llama-3.1-8b-instruct", (1, 3, 4))],
)
def test_every_end_that_config_json_lists_ends_a_response(name, ends, tmp_path):
    write_config(tmp_path, published(name))
    assert stop_token_ids(str(tmp_path), parse_config(str(tmp_path))) == ends


@pytest.mark.parametrize(("listed", "ends"), [([9, 5], (3, 5, 9)), (9, (3, 9)), (None, (3,))])
def test_ends_of_the_generation_config_are_ends_too(listed, ends, tmp_path):
    write_config(tmp_path, published("qwen3-0.6b"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    config = parse_config(str(tmp_path))
    assert stop_token_ids(str(tmp_path), config) == ends
    assert stop_token_ids(str(tmp_path), config, extra=[7]) == tuple(sorted({*ends, 7}))
