"""Reading of request fields: each is honoured, ignored as irrelevant, or refused by name.

`Fields` takes them one after the other. The functions after it read what several protocols share:
texts, formats, and tool choice, which says what tools an answer may or must call, and how many calls
it may make.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from onpolicy.agents.gateway.calls import Reply, UnreadImage
from onpolicy.agents.gateway.refusals import RefusedError, invalid, unsupported
from onpolicy.chat.messages import IMAGE_PARTS
from onpolicy.config.kinds import SMALLEST_TEMPERATURE
from onpolicy.types import SamplingParams

T = TypeVar("T")

_NAMES: dict[type, str] = {
    str: "text", int: "an integer", float: "a number", bool: "true or false", list: "a list",
    dict: "an object",
}  # fmt: skip

_NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {},
    "min_tokens": 0, "best_of": 1,
}  # fmt: skip
"""Fields that would change the sampling distribution, and the values that leave it unchanged."""


class Fields:
    """The fields of a JSON object, taken one after the other."""

    def __init__(self, body: Any, where: str = ""):
        if not isinstance(body, Mapping):
            raise invalid(where or "the body", f"must be an object, and is {body!r:.80}.")
        self._body, self._where = dict(body), where
        self.of_run: dict[str, str] = {}
        """Fields for which the run's value is used, with the reason."""

    def name(self, field: str) -> str:
        """Return the full name of a field, for messages. Example: 'messages[2].content'"""
        return f"{self._where}.{field}" if self._where else field

    def invalid(self, field: str, problem: str) -> RefusedError:
        """Return the refusal of a field's value."""
        return invalid(self.name(field), problem)

    def pop(self, field: str) -> Any:
        """Return and remove a field's value, whatever it is; None if it is missing."""
        return self._body.pop(field, None)

    @property
    def left(self) -> dict[str, Any]:
        """Return the fields that were not taken so far."""
        return dict(self._body)

    def find(self, field: str, kind: type[T]) -> T | None:
        """Return a field's value, None if missing or null. Refuses a value of another type."""
        value = self.pop(field)
        if value is None:
            return None
        if kind is float and type(value) is int and abs(value) < 1 << 53:
            value = float(value)
        is_bool = isinstance(value, bool)
        if not isinstance(value, kind) or (is_bool and kind is not bool) or value == math.inf:
            raise self.invalid(field, f"must be {_NAMES[kind]}, and is {value!r:.80}.")
        return value

    def with_field(self, field: str, value: Any) -> Fields:
        """Return these fields with one more."""
        return Fields({**self._body, field: value}, self._where)

    def take(self, field: str, kind: type[T], default: T) -> T:
        """Return a field's value, or `default` where it is missing or null."""
        value = self.find(field, kind)
        return default if value is None else value

    def need(self, field: str, kind: type[T]) -> T:
        """Return a field's value. Refuses a request without it."""
        value = self.find(field, kind)
        if value is None:
            raise self.invalid(field, f"is missing: it must be {_NAMES[kind]}.")
        return value

    def count(self, field: str) -> int | None:
        """Return an integer of at least 1, or None where it is missing or null."""
        value = self.find(field, int)
        if value is not None and value < 1:
            raise self.invalid(field, f"must be at least 1, and is {value}.")
        return value

    def temperature(self) -> float | None:
        """Return a temperature that gives useful log-probabilities, or None for the run's: also for
        a greedy one, since many agents ask for that without meaning it."""
        value = self.find("temperature", float)
        if value is None or value >= SMALLEST_TEMPERATURE:
            return value
        if not value >= 0:
            problem = f"must be at least {SMALLEST_TEMPERATURE:g}, and is {value}."
            raise self.invalid("temperature", problem)
        self.of_run[f"temperature={value:g}"] = (
            "a greedy sample has no log-probabilities to learn from"
        )
        return None

    def texts(self, field: str) -> tuple[str, ...]:
        """Return a text or several as a tuple, none of them empty; () where it is missing."""
        value = self.pop(field)
        texts = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
            raise self.invalid(field, f"must be a text or a list of texts: {value!r:.80}.")
        return tuple(texts)

    def objects(self, field: str) -> list[Fields]:
        """Return a list of objects; an empty list where the field is missing."""
        items = self.take(field, list, [])
        return [Fields(item, f"{self.name(field)}[{i}]") for i, item in enumerate(items)]

    def streams_usage(self) -> bool:
        """Return whether OpenAI's `stream_options` ask for token counts at the end of a stream."""
        options = Fields(self.take("stream_options", dict, {}), "stream_options")
        options.ignore("include_obfuscation")
        asked = options.take("include_usage", bool, False)
        options.end()
        return asked

    def refuse(self, field: str, *neutral: Any, because: str) -> None:
        """Refuse any value of a field other than null and the `neutral` values."""
        value = self.pop(field)
        if value is not None and value not in neutral:
            name = self.name(field)
            raise unsupported(name, f"{name}={value!r:.80} cannot be honoured: {because}")

    def refuse_other_sampling(self, params: SamplingParams) -> None:
        """Refuse values that would sample from another distribution than the trained policy."""
        own = "a token is sampled as the run says, and its log-probability is learnt from. Leave it out."
        for field in ("top_p", "top_k", "min_p"):
            self.refuse(field, getattr(params, field), because=own)
        for field, neutral in _NEUTRAL.items():
            self.refuse(field, neutral, because=own)
        if (seed := self.find("seed", int)) is not None:
            self.of_run[f"seed={seed}"] = (
                "a sample's seed is made of the run's, so that a run can be repeated"
            )

    def ignore(self, *fields: str) -> None:
        """Drop fields that do not change sampling."""
        for field in fields:
            self.pop(field)

    def end(self) -> None:
        """Refuse the fields that were not taken."""
        for field, value in self._body.items():
            if value is not None:
                raise RefusedError(
                    400,
                    f"Unrecognized request argument supplied: {self.name(field)}",
                    code="unknown_parameter",
                    field=self.name(field),
                )


ALWAYS_SENT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip
"""Fields that do not change sampling; they are ignored."""

SET_FOR_ALL = (
    "how much the policy thinks is a variable of its chat template, if it is one, for all requests of a "
    "run. Start it with --chat-template-kwargs '{{{}}}', and leave this out."
)
"""The reason why a request cannot set the amount of thinking."""

CREATED = 0
"""The time in every answer, constant so that a repeated run gives the same bytes."""


def content_of(value: Any, where: str, kinds: Sequence[str] = ("text",)) -> str | list[Any]:
    """Return content: as `text_of` does, or a list of parts if images are among them."""
    if not isinstance(value, list):
        return text_of(value, where, kinds)
    parts = [content_part(Fields(part, f"{where}[{i}]"), kinds) for i, part in enumerate(value)]
    return joined(parts)


def content_part(part: Fields, kinds: Sequence[str] = ("text",)) -> dict[str, Any]:
    """Return a part of text or of an image in the form of messages."""
    if part.left.get("type") not in IMAGE_PARTS:
        return {"type": "text", "text": text_part(part, kinds)}
    return {"type": "image", "image": UnreadImage(part.left, part.name("type"))}


def joined(parts: Sequence[Mapping[str, Any]]) -> str | list[Any]:
    """Return parts as the content of a message: one text, unless images are among them."""
    has_images = any(part["type"] == "image" for part in parts)
    return [*parts] if has_images else "".join(part["text"] for part in parts)


def text_of(value: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return content, which is text or a list of parts of these kinds, as one text."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise invalid(where, f"must be text or a list of parts, and is {value!r:.80}.")
    parts = [Fields(part, f"{where}[{i}]") for i, part in enumerate(value)]
    return "".join(text_part(part, kinds) for part in parts)


def text_part(part: Fields, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of one content part."""
    kind = part.need("type", str)
    if kind not in kinds:
        raise part.invalid("type", f"{kind!r}: the policy reads {', '.join(kinds)} alone.")
    return part.need("text", str)


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a tool in the form that chat templates read."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": {**function, "parameters": parameters or {}}}


def schema_in(form: Fields, nested: str = "") -> str:
    """Return the JSON schema in a response format as text; empty: none. It is in the format's own
    fields, or in an object `nested` in them."""
    match form.need("type", str):
        case "text":
            schema = None
        case "json_object":
            schema = {"type": "object"}
        case "json_schema":
            inner = Fields(form.need(nested, dict), form.name(nested)) if nested else form
            schema = inner.need("schema", dict)
            inner.ignore("name", "description", "strict")  # it is always strict
            inner.end()
        case kind:
            raise form.invalid("type", f"{kind!r} is none of text, json_object and json_schema.")
    form.end()
    return "" if schema is None else json.dumps(schema)


def usage(replies: Sequence[Reply]) -> dict[str, int]:
    """Return the token counts of a prompt and of all answers to it."""
    given, sampled = len(replies[0].prompt_ids), sum(len(reply.token_ids) for reply in replies)
    return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}


Tool = dict[str, Any]


class Choice(TypedDict):
    """The fields of a call for tool choice."""

    tools: tuple[Tool, ...]
    forces_call: bool
    named_tool: str
    one_call: bool


def openai_choice(fields: Fields, tools: Sequence[Tool]) -> Choice:
    """Return the choice in `tool_choice` and `parallel_tool_calls`. Raises RefusedError."""
    where, given = fields.name("tool_choice"), fields.pop("tool_choice")
    one_call = not fields.take("parallel_tool_calls", bool, True)
    if not isinstance(given, dict):
        return _choice(where, tools, given, ("auto", "none", "required"), one_call=one_call)
    choice = Fields(given, where)
    if (kind := choice.need("type", str)) != "function":
        raise choice.invalid("type", f"{kind!r}: a function alone can be chosen.")
    inner = (
        Fields(choice.pop("function"), choice.name("function")) if "function" in given else choice
    )
    name = inner.need("name", str)
    inner.end()
    choice.end()
    return _choice(where, tools, "required", ("required",), name, one_call)


def anthropic_choice(fields: Fields, tools: Sequence[Tool]) -> Choice:
    """Return the choice in Anthropic's `tool_choice`. Raises RefusedError."""
    where = fields.name("tool_choice")
    choice = Fields(fields.take("tool_choice", dict, {"type": "auto"}), where)
    kind = choice.need("type", str)
    name = choice.need("name", str) if kind == "tool" else ""
    one_call = choice.take("disable_parallel_tool_use", bool, False)
    choice.end()
    return _choice(f"{where}.type", tools, kind, ("auto", "none", "any", "tool"), name, one_call)


def _choice(
    where: str,
    tools: Sequence[Tool],
    kind: Any,
    kinds: Sequence[str],
    name: str = "",
    one_call: bool = False,
) -> Choice:
    if kind is not None and kind not in kinds:
        problem = f"{where}={kind!r:.80} cannot be honoured: it is none of {', '.join(kinds)}."
        raise unsupported(where, problem)
    forces = kind in ("required", "any", "tool")
    names = [tool["function"]["name"] for tool in tools]
    if forces and not tools:
        raise invalid(where, f"{kind!r} forces a call, and there are no tools. Give some.")
    if name and name not in names:
        raise invalid(where, f"there is no tool {name!r}. There are {', '.join(names)}.")
    given = () if kind == "none" else tuple(tools)
    return Choice(tools=given, forces_call=forces, named_tool=name, one_call=one_call)
