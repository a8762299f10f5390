"""The example with images: what its pictures show, how its checkpoint reads them, and its launcher."""

import io
import json
import random
import re
import runpy
from collections import Counter
from pathlib import Path

import numpy
import pytest
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

from tests.examples.test_launchers import commands, launch

__all__ = ["commands", "launch"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "shapes"
MAKE = runpy.run_path(str(EXAMPLE / "make_inputs.py"))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shapes")
    MAKE["main"](directory / "inputs")
    return directory


@pytest.fixture(scope="module")
def rows():
    return MAKE["rows"](random.Random(0))


def opened(row):
    return Image.open(io.BytesIO(row["images"][0]["bytes"]))


def coloured_parts(image):
    """The number of areas that hang together and are not black."""
    left = {tuple(place) for place in numpy.argwhere(numpy.asarray(image).any(-1)).tolist()}
    count = 0
    while left:
        count, edge = count + 1, [left.pop()]
        while edge:
            y, x = edge.pop()
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            edge += near
    return count


def test_a_picture_shows_as_many_shapes_as_its_label_says(rows):
    assert [str(coloured_parts(opened(row))) for row in rows] == [row["label"] for row in rows]
    assert {opened(row).size for row in rows} == {(32, 32)}


def test_no_answer_is_right_by_far_more_often_than_a_quarter_of_the_time(rows):
    for part in (rows[: MAKE["NUM_TRAIN"]], rows[MAKE["NUM_TRAIN"] :]):
        counts = Counter(row["label"] for row in part)
        assert set(counts) == set("1234") and max(counts.values()) < 0.3 * len(part)


def test_no_picture_is_learnt_from_and_evaluated_on(rows):
    pictures = {row["images"][0]["bytes"] for row in rows}
    assert len(pictures) == len(rows) == 2048 + 256


def test_the_checkpoint_reads_a_picture_as_sixteen_tokens_between_the_marks_of_its_family(
    work, rows
):
    model = work / "inputs" / "model"
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(model)
    assert f"{loaded.num_parameters():,} random weights" in (EXAMPLE / "README.md").read_text()
    config = loaded.config
    read = AutoImageProcessor.from_pretrained(model)(images=[opened(rows[0])], return_tensors="pt")
    assert read["image_grid_thw"].tolist() == [[1, 8, 8]]
    tokenizer = AutoTokenizer.from_pretrained(model)
    parts = [{"type": "image"}, {"type": "text", "text": "How many shapes?"}]
    chat = [{"role": "user", "content": parts}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>How many shapes?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.pad_token_id not in ids
    assert ids[6:9] == [
        config.vision_start_token_id, config.image_token_id, config.vision_end_token_id,
    ]  # fmt: skip
    assert all(len(tokenizer.encode(digit)) == 1 for digit in "1234")


def test_the_launcher_is_a_valid_run(launch, work):
    done = launch("shapes/run.sh", "--dry-run", WORK_DIR=str(work))
    assert done.returncode == 0, done.stderr
    assert "2048 prompts" in done.stdout


def test_what_was_recorded_had_no_token_mismatched_and_ended_as_the_page_says():
    record = json.loads((EXAMPLE.parents[1] / "benchmarks/results/shapes.json").read_text())
    page = (EXAMPLE / "README.md").read_text()
    assert not any(run["mismatched_tokens"] for run in record["runs"].values())
    for seed, run in record["runs"].items():
        held_out = " | ".join(f"{value:.2f}" for value in run["held_out_greedy"].values())
        assert re.search(rf"\| {seed} \| {re.escape(held_out)} \|", page), seed
