"""Images of the unmodified clients of OpenAI and Anthropic reach the policy at their places."""

import base64
from dataclasses import replace

import openai
import pytest

from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.chat.template import ChatTemplate
from tests.onpolicy.agents.gateway.test_protocols import through
from tests.support.acting import PARAMS, Says
from tests.support.seeing import BLUE, KINDS, RED, checkpoint, processed, template, url_of
from tests.support.tiny_images import encoded_image

MODEL = {"model": "policy"}
TEXT = {"type": "text", "text": "See"}
URL = {"type": "image_url", "image_url": {"url": url_of(RED), "detail": "auto"}}
INPUT = [
    {"type": "input_text", "text": "See"},
    {"type": "input_image", "image_url": url_of(RED), "detail": "auto"},
]
SOURCE = {
    "type": "image",
    "source": {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(RED).decode(),
    },
    "cache_control": {"type": "ephemeral"},
}
BARE = [{"role": "user", "content": [TEXT, {"type": "image"}]}]


async def by_chat(ours, theirs, opened):
    return await ours.chat.completions.create(
        messages=[{"role": "user", "content": [TEXT, URL]}], **MODEL
    )


async def by_responses(ours, theirs, opened):
    return await ours.responses.create(input=[{"role": "user", "content": INPUT}], **MODEL)


async def by_messages(ours, theirs, opened):
    return await theirs.messages.create(
        messages=[{"role": "user", "content": [TEXT, SOURCE]}], max_tokens=9, **MODEL
    )


class Tells(Says):
    """Says words in the tokens of a checkpoint, and keeps what it was asked."""

    def __init__(self, kind, *words):
        super().__init__(words)
        self.tokenizer, self.requests = checkpoint(kind)[1], []
        self.stop = self.tokenizer.eos_token_id

    def asked(self, branch):
        self.requests.append(branch.ask)
        super().asked(branch)

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)


def asked_by(act, kind="qwen3_vl", words=("red",), placed=True, rule="refuse"):
    """The requests to the policy, what `act` returned, and the trajectories to learn from."""
    says = Tells(kind, *words)
    params = replace(PARAMS, stop_token_ids=(says.stop,))
    chat = template(kind, rule) if placed else ChatTemplate(says.tokenizer, [says.stop])
    given = {"parser": AnswerParser(), "draws": says, "decode": says.tokenizer.decode}
    episode, found = through(act, template=chat, params=params, **given)
    return says.requests, found, episode.trajectories


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", [by_chat, by_responses, by_messages])
def test_an_image_reaches_the_policy_as_the_publishers_processor_has_it(act, kind):
    (request,), _, _ = asked_by(act, kind)
    assert [*request.prompt_ids] == processed(kind, BARE, RED)[0]
    assert [image.data for image in request.images] == [RED]


async def several_by_chat(ours, theirs, opened):
    chat = [{"role": "user", "content": [TEXT, URL]}]
    for image in (BLUE, RED):
        said = await ours.chat.completions.create(messages=chat, **MODEL)
        url = {"type": "image_url", "image_url": {"url": url_of(image)}}
        chat += [said.choices[0].message, {"role": "user", "content": [url]}]
    await ours.chat.completions.create(messages=chat, **MODEL)


async def several_by_responses(ours, theirs, opened):
    before = None
    for image in (RED, BLUE, RED):
        part = {"type": "input_image", "image_url": url_of(image), "detail": "auto"}
        parts = [part] if before else [INPUT[0], part]
        said = await ours.responses.create(
            input=[{"role": "user", "content": parts}], previous_response_id=before, **MODEL
        )
        before = said.id


async def several_by_messages(ours, theirs, opened):
    chat = [{"role": "user", "content": [TEXT, SOURCE]}]
    for image in (BLUE, RED):
        said = await theirs.messages.create(messages=chat, max_tokens=9, **MODEL)
        data = base64.b64encode(image).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        chat += [
            {"role": "assistant", "content": said.content},
            {"role": "user", "content": [{"type": "image", "source": source}]},
        ]
    await theirs.messages.create(messages=chat, max_tokens=9, **MODEL)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", [several_by_chat, several_by_responses, several_by_messages])
def test_a_chat_of_several_images_is_one_trajectory_that_has_them_in_order(act, kind):
    requests, _, trajectories = asked_by(act, kind, ["red", "blue", "end"])
    assert [len(request.images) for request in requests] == [1, 2, 3]
    (trajectory,) = trajectories
    assert [image.data for image in trajectory.images] == [RED, BLUE, RED]
    said = checkpoint(kind)[1].decode(trajectory.response_ids)
    assert said.replace(checkpoint(kind)[1].eos_token, " ") == "red blue end "


RESULTS = [
    ("/chat/completions", {"messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I do."},
        {"role": "tool", "tool_call_id": "c1", "content": [TEXT, URL]}]}),
    ("/responses", {"input": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I do."},
        {"type": "function_call_output", "call_id": "c1", "output": INPUT}]}),
    ("/messages", {"max_tokens": 9, "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I do."},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [TEXT, SOURCE]}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), RESULTS)
def test_the_image_of_a_tools_result_is_read_where_the_result_stands(path, body):
    async def act(ours, theirs, opened):
        await ours.post(path, body={**MODEL, **body}, cast_to=object)

    (request,), _, _ = asked_by(act)
    (image,) = request.images
    before = checkpoint("qwen3_vl")[1].decode(request.prompt_ids[: image.start])
    assert image.data == RED and before.endswith("<|im_start|>tool\nSee<|vision_start|>")


@pytest.mark.parametrize("rule", ["new", "keep"])
def test_another_image_in_the_past_begins_another_trajectory(rule):
    """Also where it has as many tokens, so that the texts are equal."""
    green = {"type": "image_url", "image_url": {"url": url_of(encoded_image("green"))}}

    async def act(ours, theirs, opened):
        for url in (URL, green):
            chat = [{"role": "user", "content": [TEXT, url]}]
            if url is green:
                chat += [{"role": "assistant", "content": "red"}, {"role": "user", "content": "?"}]
            await ours.chat.completions.create(messages=chat, **MODEL)

    requests, _, trajectories = asked_by(act, rule=rule)
    assert [request.images[0].data for request in requests] == [RED, encoded_image("green")]
    assert len(trajectories) == 2


def test_equal_requests_are_told_from_those_with_other_images():
    green = {"type": "image_url", "image_url": {"url": url_of(encoded_image("green"))}}

    async def act(ours, theirs, opened):
        for url in (URL, green, URL):
            messages = [{"role": "user", "content": [TEXT, url]}]
            await ours.chat.completions.create(messages=messages, **MODEL)

    requests, _, _ = asked_by(act)
    seeds = [request.sampling_seed for request in requests]
    assert len({*seeds}) == 3
    assert seeds[0] == asked_by(by_chat)[0][0].sampling_seed


FAR = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
FILE = {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}
PATH = {"type": "image_url", "image_url": {"path": "/etc/hostname"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("content", "placed", "problem"),
    [
        ([TEXT, URL], False, "'image_url': without --images the policy reads text alone"),
        ([TEXT, FAR], True, "images are not fetched from a network"),
        ([TEXT, FILE], True, "no files of the host"),
        ([TEXT, PATH], True, "no files of the host"),
        ([TEXT, BROKEN], True, "no image can be read"),
        ([TEXT, SOUND], True, "'input_audio': the policy reads text"),
        ("<|image_pad|>", True, "in the prompt, and 0 images"),
    ],
)
def test_what_cannot_be_seen_is_refused_and_nothing_is_sampled(content, placed, problem):
    async def act(ours, theirs, opened):
        with pytest.raises(openai.BadRequestError, match=problem) as refused:
            await ours.chat.completions.create(
                messages=[{"role": "user", "content": content}], **MODEL
            )
        await ours.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **MODEL)
        return refused.value.param

    requests, param, _ = asked_by(act, placed=placed)
    assert len(requests) == 1
    assert param.startswith("messages[0].content[1]" if isinstance(content, list) else "messages")


def test_tokens_of_images_are_counted():
    async def act(ours, theirs, opened):
        messages = [{"role": "user", "content": [TEXT, SOURCE]}]
        counted = await theirs.messages.count_tokens(messages=messages, **MODEL)
        said = await theirs.messages.create(messages=messages, max_tokens=9, **MODEL)
        assert counted.input_tokens == said.usage.input_tokens

    asked_by(act)
