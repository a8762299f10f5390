"""Rows with images, as publishers ship them, become prompts with images at their places."""

import json
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from onpolicy.config.groups import DataConfig
from onpolicy.errors import ConfigError
from onpolicy.rewards.endpoint import words_of
from onpolicy.rollout.prompts import identity, load_prompts
from onpolicy.run.saving.checkpoint import digest_prompts
from onpolicy.types import Sample
from tests.support.samples import answered, make_completion
from tests.support.seeing import BLUE, KINDS, RED, checkpoint, processed, url_of

ASKED = [{"role": "user", "content": "<image>What is it?"}]
BARE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]


@pytest.fixture
def load(tmp_path):
    """Prompts of rows, in a file of JSON lines beside red.png and blue.png."""
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)

    def loaded(*rows, kind="qwen3_vl", is_chat=True, sees=True, file="rows.jsonl"):
        path = tmp_path / file
        if file.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        _, tokenizer, placer = checkpoint(kind)
        config = DataConfig(apply_chat_template=is_chat)
        return load_prompts(
            str(path), config, tokenizer, 1000, placer=placer if sees else None
        )  # fmt: skip

    return loaded


def row(images, prompt=ASKED, **more):
    return {"prompt": prompt, "images": images, "label": "x", **more}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "file"),
    [
        (row(["red.png"]), "rows.jsonl"),
        (row("red.png"), "rows.jsonl"),
        (row([url_of(RED)]), "rows.jsonl"),
        (row([{"path": "red.png"}]), "rows.jsonl"),
        (row([{"bytes": RED, "path": "gone.png"}]), "rows.parquet"),
        (row([RED]), "rows.parquet"),
        (row(["red.png"], "<image>What is it?"), "rows.jsonl"),
        (row(["red.png"], BARE), "rows.jsonl"),
        ({"prompt": ASKED, "image": "red.png", "images": None, "label": "x"}, "rows.jsonl"),
        ({"prompt": ASKED, "image": {"bytes": RED, "path": None}, "label": "x"}, "rows.parquet"),
        (row([], [{"role": "user", "content": [
            {"type": "image", "image": "red.png"}, {"type": "text", "text": "What is it?"}]}]),
         "rows.jsonl"),
    ],
)  # fmt: skip
def test_an_image_in_every_form_gives_the_tokens_of_the_publishers_processor(
    load, kind, given, file
):
    (prompt,) = load(given, kind=kind, file=file)
    assert prompt.prompt_ids == processed(kind, BARE, RED)[0]
    assert [image.data for image in prompt.images] == [RED]
    assert not {"images", "image"} & prompt.metadata.keys()


def test_places_take_the_rows_images_in_their_order_through_all_messages(load):
    chat = [
        {"role": "user", "content": "<image> and <image>?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image"}]},
    ]
    (prompt,) = load(row(["red.png", "blue.png", "red.png"], chat))
    assert [image.data for image in prompt.images] == [RED, BLUE, RED]
    assert prompt.text.count("<|image_pad|>") == 3


def test_a_prompt_without_images_stays_text_beside_rows_that_have_some(load):
    plain = [{"role": "user", "content": "The tag <image> is not HTML."}]
    seeing, text = load(row(["red.png"]), row([], plain))
    assert seeing.images and not text.images
    (alone,) = load(row(None, plain), sees=False)
    assert (text.prompt_ids, text.text, text.messages) == (
        alone.prompt_ids, alone.text, alone.messages
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "own"), [
    ("qwen3_vl", "<|vision_start|><|image_pad|><|vision_end|>"), ("gemma3", "<start_of_image>"),
])  # fmt: skip
def test_a_plain_text_holds_the_models_own_marker_or_the_common_one(load, kind, own):
    common, marked = load(
        row(["red.png"], "See <image>: it is", label="1"),
        row(["red.png"], f"See {own}: it is", label="2"),
        kind=kind, is_chat=False,
    )  # fmt: skip
    assert common.prompt_ids == marked.prompt_ids
    assert common.images == marked.images and len(common.images) == 1


def test_rows_differ_by_their_images(load):
    rows = [row(["red.png"]), row(["blue.png"]), row([url_of(RED)]), row(["red.png"])]
    red, blue = load(*rows, kind="gemma3")  # where they have the same tokens
    assert red.prompt_ids == blue.prompt_ids and red.text == blue.text
    assert identity(red) != identity(blue)
    assert digest_prompts([red]) != digest_prompts([replace(blue, index=0)])


def test_messages_are_sent_as_they_are_and_read_the_same_again(load):
    (prompt,) = load(row(["red.png"]))
    again = json.loads(json.dumps(prompt.messages))
    assert again[0]["content"][0] == {"type": "image_url", "image_url": {"url": url_of(RED)}}
    (reread,) = load(row(None, again))
    assert (reread.prompt_ids, reread.images) == (prompt.prompt_ids, prompt.images)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (row(["red.png"], [{"role": "user", "content": "What?"}]), "no place .*last 1 images"),
        (row(["red.png", "blue.png"]), "no place .*last 1 images"),
        (row(["red.png"], [{"role": "user", "content": "<image><image>"}]), "no more images"),
        (row([], BARE), "no more images"),
        (row(["none.png"]), "none.png: cannot be read"),
        (row(["rows.jsonl"]), "no image can be read"),
        (row(["https://example.com/a.png"]), "not fetched from a network"),
        (row(["iVBORw0KGgo="]), "cannot be read"),
        (row(["red.png"], image="red.png"), "has images and image"),
        (row([], videos=["a.mp4"]), "has videos, and a run reads and trains text and images alone"),
        (row([], [{"role": "user", "content": "a <|image_pad|>"}]), "1 times '<.image_pad.>'"),
    ],
)
def test_a_row_whose_images_cannot_be_placed_is_named(load, given, problem):
    with pytest.raises(ConfigError, match=f"rows.jsonl:2: .*{problem}"):
        load(row(["red.png"]), given)


@pytest.mark.parametrize("prompt", ["See <|image_pad|>", "See <image><image>", "See"])
def test_a_plain_text_with_more_or_fewer_places_is_refused(load, prompt):
    images = [] if "pad" in prompt else ["red.png"]
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the prompt has (no|a) place"):
        load(row(images, prompt), is_chat=False)


@pytest.mark.parametrize(
    "given", [row(["red.png"]), row([], BARE), {**row([]), "image": "red.png"}]
)
def test_without_images_a_row_with_some_is_refused_and_told_of_the_flag(load, given):
    with pytest.raises(
        ConfigError, match=r"reads (and trains )?text alone.*With --images a gemma3 or"
    ):
        load(given, sees=False)


def test_a_judge_reads_where_an_image_stands(load):
    (prompt,) = load(row(["red.png"], [{"role": "user", "content": "See <image> well."}]))
    trajectory = answered(prompt, make_completion([5], [-1.0]))
    words = words_of(Sample(prompt=prompt, sample_index=0, trajectory=trajectory))
    assert words["prompt"] == words["question"] == "See <image> well."
