"""A run on a model that also sees images, as it is published, on a real server."""

import json

import pytest
import torch
from transformers import AutoModelForImageTextToText

from onpolicy.models.weight_files import CheckpointReader
from tests.support.exported_parts import faults
from tests.support.published import make_published
from tests.support.train_runs import finish, metrics_of, start_train

pytestmark = [pytest.mark.engine, pytest.mark.runs]


def test_a_text_part_trains_in_parity_and_is_saved_in_its_whole(data, tmp_path):
    """The server loads the text part from the whole's files, and every later push is one of it."""
    path = make_published(tmp_path / "model", "gemma-3-4b-it")
    save = ("--save", str(tmp_path / "save"), "--save-interval", "1")
    process = start_train(path, data, tmp_path, *save, "--num-rollout", "2", "--cpu-threads", "1")
    assert "its text part is trained, as a Gemma3ForCausalLM" in finish(process)
    records = metrics_of(tmp_path)
    assert [r["parity/num_mismatched_tokens"] for r in records] == [0, 0]
    assert all(r["parity/num_compared_tokens"] > 50 for r in records)
    first, last = (tmp_path / "save" / f"step_00000{n}" / "hf" for n in (1, 2))
    assert [*faults(path, last)] == [*faults(first, last)] == []
    assert json.loads((last / "config.json").read_text())["model_type"] == "gemma3"
    whole, info = AutoModelForImageTextToText.from_pretrained(last, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    norm = dict(CheckpointReader(last).tensors())["model.norm.weight"]
    assert torch.equal(whole.model.language_model.norm.weight, norm.to(whole.dtype))
