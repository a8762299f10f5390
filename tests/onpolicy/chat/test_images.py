"""Images in chats: their places are the publishers', and stay through turns."""

import base64

import numpy as np
import pytest

from onpolicy.chat.messages import exactly, images_of, loosely, read_chat
from onpolicy.chat.template import ChatTemplate
from tests.support.seeing import BLUE, KINDS, RED, checkpoint, processed, read, template, url_of
from tests.support.tiny_images import encoded_image

MARKERS = {
    "qwen3_vl": ["<|image_pad|>"],
    "gemma3": ["<start_of_image>", "<image_soft_token>"],
}


def seen(image, text="See"):
    url = {"type": "image_url", "image_url": {"url": url_of(image)}}
    return {"role": "user", "content": [{"type": "text", "text": text}, url]}


def answer(kind, text):
    tokenizer = checkpoint(kind)[1]
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [*ids, tokenizer.eos_token_id], {"role": "assistant", "content": text}


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_has_the_tokens_and_pixels_of_the_publishers_processor(kind):
    bare = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What is it?"}]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image"}]},
    ]
    expected, pixels = processed(kind, bare, RED, BLUE)
    images = iter([RED, BLUE])
    chat = read_chat(bare, lambda said: checkpoint(kind)[2].measured(next(images)))
    token_ids = template(kind).begin(chat)
    assert token_ids == expected
    assert checkpoint(kind)[1].decode(token_ids) == template(kind).opening(chat)
    placed = template(kind).placed(token_ids, images_of(chat))
    assert [image.data for image in placed] == [RED, BLUE]
    image_token = checkpoint(kind)[1].convert_tokens_to_ids(MARKERS[kind][-1])
    within = [i for image in placed for i in range(image.start, image.end)]
    assert within == [i for i, token in enumerate(expected) if token == image_token]
    ours = [checkpoint(kind)[2]._pixels(image).values for image in (RED, BLUE)]
    assert np.array_equal(np.concatenate(ours), np.concatenate([*map(np.asarray, [pixels])]))


SPELLINGS = [
    {"type": "image", "image": RED},
    {"type": "image", "image": url_of(RED)},
    {"type": "image", "image": {"bytes": RED, "path": None}},
    {"type": "image_url", "image_url": {"url": url_of(RED), "detail": "auto"}},
    {"type": "image_url", "image_url": url_of(RED)},
    {"type": "input_image", "image_url": url_of(RED), "detail": "auto", "file_id": None},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                 "data": base64.b64encode(RED).decode()}},
]  # fmt: skip


@pytest.mark.parametrize("part", SPELLINGS)
def test_every_spelling_of_an_image_is_the_same_image_and_without_images_refused(part):
    messages = [{"role": "user", "content": [{"text": "See"}, part]}]
    chat = read("qwen3_vl", messages)
    assert images_of(chat) == images_of(read("qwen3_vl", [seen(RED)]))
    assert template("qwen3_vl").begin(chat) == template("qwen3_vl").begin(
        read("qwen3_vl", [seen(RED)])
    )
    with pytest.raises(ValueError, match=f"type='{part['type']}': this model reads text alone"):
        read_chat(messages)
    with pytest.raises(ValueError, match="this model reads text alone"):
        ChatTemplate(checkpoint("qwen3_vl")[1]).begin(messages)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image", "image": "/etc/hostname"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "-"}},
        {"type": "image", "image": b"no image"},
        {"type": "image"},
        {"type": "video", "video": url_of(RED)},
    ],
)
def test_what_is_no_image_at_hand_is_refused(part):
    with pytest.raises(
        ValueError, match=r"network|files of the host|base64|no image|must be|video"
    ):
        read("gemma3", [{"role": "user", "content": [part]}])


# vllm#57740: a marker that a user wrote took the place of the image.
@pytest.mark.parametrize(("kind", "marker"), [(k, m) for k in KINDS for m in MARKERS[k]])
def test_a_marker_that_a_user_writes_is_refused(kind, marker):
    for messages in ([seen(RED, f"What is {marker}?")], [{"role": "user", "content": marker}]):
        chat = read(kind, messages)
        with pytest.raises(
            ValueError, match=r"in the prompt, and [01] images|and the [01] images have"
        ):
            template(kind).placed(template(kind).begin(chat), images_of(chat))


# Qwen-VL-Series-Finetune#176: the image of a second turn was the first one again.
@pytest.mark.parametrize("rule", ["new", "keep", "words", "refuse"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_turn_has_its_own_image_after_what_was_sampled(kind, rule):
    chat, first = template(kind, rule), read(kind, [seen(RED)])
    ids, said = answer(kind, "red")
    token_ids = [*chat.begin(first), *ids]
    new = read(kind, [seen(BLUE, "And")])
    more = chat.go_on(token_ids, [*first, said], new)
    assert (more.kept, more.drift) == (len(token_ids), None)
    (image,) = chat.placed(more.token_ids, images_of(new), more.kept)
    assert image.data == BLUE and image.start > len(token_ids)
    assert [*token_ids, *more.token_ids] == chat.begin([*first, said, *new])
    assert chat.after_answer(token_ids, new) == more.token_ids


# verl#3708: tokens of images in the policy's own answers and the images did not match.
@pytest.mark.parametrize(("kind", "marker"), [(k, m) for k in KINDS for m in MARKERS[k]])
def test_a_marker_that_the_policy_sampled_stays_ordinary(kind, marker):
    chat, first = template(kind, "refuse"), read(kind, [seen(RED)])
    ids, said = answer(kind, f"a {marker} b")
    token_ids = [*chat.begin(first), *ids]
    new = read(kind, [seen(BLUE, "And")])
    more = chat.go_on(token_ids, [*first, said], new)
    assert more.drift is None
    assert [image.data for image in chat.placed(more.token_ids, images_of(new), more.kept)] == [
        BLUE
    ]


@pytest.mark.parametrize("same", [exactly, loosely])
def test_messages_differ_by_what_their_images_show(same):
    given = [seen(RED), seen(BLUE), {"role": "user", "content": "See"}]
    red, blue, text = read("gemma3", given)
    assert len({str(same(message)) for message in (red, blue, text)}) == 3
    again = read("gemma3", [seen(encoded_image("red", kind="BMP"))])[0]
    assert same(again) == same(red)


def test_a_template_that_leaves_out_an_image_or_the_words_beside_it_is_refused():
    _, tokenizer, placer = checkpoint("gemma3")
    chat = read("gemma3", [seen(RED, "What is it?")])
    for source, problem in [
        ("{{ messages[0].content[0].text }}", "0 times '<start_of_image>' in the prompt"),
        ("<start_of_image>", "leaves out what role=user says .'What is it"),
    ]:
        deaf = ChatTemplate(tokenizer, placer=placer)
        source, tokenizer.chat_template = tokenizer.chat_template, source
        try:
            with pytest.raises(ValueError, match=problem):
                deaf.opening(chat)
        finally:
            tokenizer.chat_template = source
