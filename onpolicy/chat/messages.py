"""Messages and tools in OpenAI's form: validation and normalisation of what rows hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from onpolicy.images.placing import SeenImage
from onpolicy.system.files import parse_json

Message = Mapping[str, Any]
"""A message in OpenAI's form: role, content (text, or a list of parts), and maybe
reasoning_content, tool_calls (arguments are JSON text or objects) and tool_call_id."""

_TEXT_PARTS = (None, "text", "input_text", "output_text")
"""The types of text parts in OpenAI's two interfaces; datasets often leave the type out."""

IMAGE_PARTS = ("image", "image_url", "input_image")
"""The types of parts for images, of OpenAI's two interfaces, Anthropic's and transformers'. One that was
read is `{"type": "image", "image": SeenImage}`."""

See = Callable[[Any], SeenImage]
"""A function that reads what a part says of its image: an empty object where it marks a place alone.
Raises ValueError for what is no image."""


class Arguments(dict[str, Any]):
    """The arguments of a tool call as most templates want them: an object, whose text is its JSON.
    Some templates write `arguments | tojson`, some iterate over the items, and some write
    `arguments` as it is, for which Python would write `{'a': 1}`."""

    def __init__(self, values: Mapping[str, Any], text: str):
        super().__init__(values)
        self.text = text

    def __str__(self) -> str:
        return self.text


def read_chat(value: Any, see: See | None = None, place: str = "") -> list[dict[str, Any]]:
    """Return the messages of a prompt: a text is one user message, and the JSON text of a chat is a
    chat. Fields that are null and empty lists of calls are left out, and parts of text are joined.
    An assistant message that only calls tools has the content None. see, place: as in `seen`. Raises
    ValueError with the message and the rule for anything that would not reach the policy unchanged."""
    if isinstance(value, str):
        messages = _chat_in(value)
        value = [{"role": "user", "content": value}] if messages is None else messages
    if not isinstance(value, list) or not value:
        raise ValueError(f"{value!r:.80}: must be text, or a list of chat messages")
    return [_read_message(each, number, see, place) for number, each in enumerate(value, 1)]


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a row: none, JSON schemas of functions, or their JSON as text. Raises
    ValueError for anything else."""
    try:
        tools = parse_json(value) if isinstance(value, str) and value.strip() else value or []
        if isinstance(tools, list):
            tools = [parse_json(tool) if isinstance(tool, str) else tool for tool in tools]
    except ValueError:
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(
            f"{value!r:.80}: tools must be a list of JSON schemas, or its JSON as text"
        )
    return tools


def _chat_in(text: str) -> list[Any] | None:
    """Return the chat that a text holds as JSON, which is how CSV can hold one."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = parse_json(text)
    except ValueError:
        return None
    is_chat = isinstance(value, list) and value and all(_has_role(each) for each in value)
    return value if is_chat else None


def _has_role(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _read_message(value: Any, number: int, see: See | None, place: str) -> dict[str, Any]:
    if not _has_role(value):
        raise ValueError(
            f"message {number} is {value!r:.80}. Chat messages are objects with a role and a content"
        )
    message = {key: each for key, each in value.items() if each is not None}
    role, content = message["role"], seen(message.get("content"), see, place)
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = _read_calls(calls, number)
    may_be_silent = role == "assistant" and (calls or message.get("reasoning_content"))
    if not isinstance(content, (str, list)) and not (content is None and may_be_silent):
        raise ValueError(
            f"message {number}, role={role}: content={content!r:.80}, and it must be text, or a list "
            "of text parts"
        )
    if role == "user" and not content:
        raise ValueError(f"message {number}, role=user: content is empty, so nothing is asked")
    return {"role": role, "content": content} | {
        key: each for key, each in message.items() if key not in ("role", "content")
    }


def _read_calls(value: Any, number: int) -> list[dict[str, Any]]:
    """Return tool calls without null fields, in OpenAI's form or with the name beside the
    arguments; also from JSON text, as tables often have them."""
    calls, found = parsed(value), []
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        named = call.get("function") or call if isinstance(call, dict) else None
        if not isinstance(named, dict) or not isinstance(named.get("name"), str):
            raise ValueError(
                f"message {number}: tool_calls={value!r:.80}, and they must be a list of objects, "
                "each with a function that has a name and arguments"
            )
        found.append({key: each for key, each in call.items() if each is not None})
    return found


def seen(content: Any, see: See | None, place: str = "") -> Any:
    """Return the content of a message with its images read: text where there are none, otherwise parts
    of text and images. see: None refuses images. place: a text that stands for an image; empty: none.
    Raises ValueError for another part."""
    parts = [{"text": content}] if isinstance(content, str) else content
    if see is None or not isinstance(parts, (list, tuple)):
        return text_of(content)
    found = list[dict[str, Any]]()
    for part in parts:
        if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
            found.append({"type": "image", "image": see(said_of_image(part))})
            continue
        first, *more = text_of([part]).split(place) if place else [text_of([part])]
        found.append({"type": "text", "text": first})
        for text in more:
            found.append({"type": "image", "image": see({})})
            found.append({"type": "text", "text": text})
    has_images = any(part["type"] == "image" for part in found)
    return [part for part in found if part.get("text") != ""] if has_images else text_of(found)


def said_of_image(part: Mapping[str, Any]) -> Any:
    """Return what an image's part says of it, in a form of `read_image`, Anthropic's included."""
    said = {key: each for key, each in part.items() if key != "type" and each is not None}
    source = said.get("source")
    if isinstance(source, Mapping) and source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return source or said


def images_of(messages: Sequence[Message]) -> list[SeenImage]:
    """Return the images of messages that were read, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["image"] for part in parts if _is_seen(part)]


def _is_seen(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("image"), SeenImage)


def texts_of(content: Any) -> list[str]:
    """Return the texts of a message's content: one, unless images are between them."""
    parts = content if isinstance(content, (list, tuple)) else [{"text": content or ""}]
    return [text_of([part]) for part in parts if not _is_seen(part)]


def text_of(content: Any) -> Any:
    """Return the content of a message with its text parts joined; other content unchanged. An image
    that was read has a text by which it differs from others. Raises ValueError for another part."""
    if not isinstance(content, (list, tuple)):
        return content
    texts = []
    for part in content:
        if _is_seen(part):
            texts.append(f"<image {part['image'].digest}>")
            continue
        is_object = isinstance(part, Mapping)
        kind = part.get("type") if is_object else type(part).__name__
        if not is_object or kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError(f"content part of type={kind!r}: this model reads text alone")
        texts.append(part["text"])
    return "".join(texts)


class CallForm(NamedTuple):
    """A form in which templates read tool calls."""

    as_objects: bool
    """Whether arguments are objects, or JSON text."""

    content: str | None
    """The content of a message that has calls alone."""


FORMS = (CallForm(True, ""), CallForm(False, ""), CallForm(True, None), CallForm(False, None))
"""The forms in the order of trial. Most templates want objects, and some of them search the content
(Qwen3). DeepSeek-V3's wants text and None: with "" it leaves the calls out."""


def for_template(message: Message, form: CallForm) -> dict[str, Any]:
    """Return a message as chat templates read it: content as one text, or as parts with the places of
    its images, calls in the given form, and no None fields, except maybe the content."""
    plain = {key: each for key, each in message.items() if each is not None}
    if images_of([message]):
        plain["content"] = [
            {"type": "image"} if _is_seen(part) else part for part in message["content"]
        ]
    else:
        plain["content"] = text_of(message.get("content"))
    if calls := plain.pop("tool_calls", None):
        plain["content"] = plain["content"] or form.content
        plain["tool_calls"] = [_with_arguments(call, form.as_objects) for call in calls]
    return plain


def _with_arguments(call: Mapping[str, Any], as_objects: bool) -> dict[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], as_objects)}
    arguments = call.get("arguments", {})
    values = parsed(arguments) if isinstance(arguments, str) and arguments.strip() else arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not as_objects:
        return {**call, "arguments": text}
    # A call without arguments has an empty text in some clients' histories.
    values = {} if values == "" or values is None else values
    is_object = isinstance(values, Mapping)
    return {**call, "arguments": Arguments(values, text or "{}") if is_object else values}


def parsed(arguments: Any) -> Any:
    """Return the value of JSON text; any other text or value unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def exactly(message: Message) -> Any:
    """Return a key that is equal for messages which a client returned unchanged."""
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    named = [[call.get("name"), call.get("arguments")] for call in calls]
    thinking, answers = message.get("reasoning_content"), message.get("tool_call_id")
    content = text_of(message.get("content"))
    return [message.get("role"), content or "", named, thinking or "", answers or ""]


def loosely(message: Message) -> Any:
    """Return a key that is equal for messages which a client returned with the same meaning: with
    other space around the content, arguments serialised anew, or without the thinking."""
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    named = [[call.get("name"), parsed(call.get("arguments"))] for call in calls]
    return [message.get("role"), str(text_of(message.get("content")) or "").strip(), named]


def answered(messages: Sequence[Message], response: str) -> list[Message]:
    """Return a prompt's messages and the answer, which continues a last message by the assistant."""
    *before, last = messages
    if last["role"] != "assistant":
        return [*messages, {"role": "assistant", "content": response}]
    return [*before, {**last, "content": (last.get("content") or "") + response}]


def role_in(template: str, role: str) -> str:
    """Return the role for a template with this source: most leave out a developer's message."""
    return "system" if role == "developer" and role not in template else role


def names_called(messages: Sequence[Message]) -> list[str]:
    """Return the names of the functions that messages call, in their order."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return [(call.get("function") or call).get("name", "") for call in calls]


def replaced(value: Any, texts: Mapping[str, str]) -> Any:
    """Return a message, or a part of one, with texts in it replaced."""
    if isinstance(value, Mapping):
        return {key: replaced(each, texts) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [replaced(each, texts) for each in value]
    if isinstance(value, str):
        for text, other in texts.items():
            value = value.replace(text, other)
    return value
