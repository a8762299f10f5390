"""Chat rendering and stop tokens of a server, as in a run's gateway. In every contract.

Stock SGLang passes a developer message to templates that know no developer, and they write nothing
of it (sgl-project/sglang#40082); joins parts of text by a space; turns a last message by the
assistant into one by the user; ends no answer at the token with which the chat template ends it, if
`eos_token_id` does not list it; and ends every response at tokens of other models (`<|eom_id|>`),
should a vocabulary have them. Here a developer becomes a system role where the template knows none,
parts are joined as they are, a last message by the assistant is continued, and messages whose words
a template leaves out are refused.

Source: OpenAIServingChat and OpenAIServingResponses, sglang/srt/entrypoints/openai. Can go when
SGLang does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from onpolicy.chat.bounded import bound_templates
from onpolicy.chat.messages import role_in
from onpolicy.chat.rendering import left_out
from onpolicy.chat.turn_ends import TurnEnds, turn_ends
from sglang_patches import registry

_HANDLERS = "sglang.srt.entrypoints.openai"
PROCESS = f"{_HANDLERS}.serving_chat.OpenAIServingChat._process_messages"
CONVERT = f"{_HANDLERS}.serving_chat.OpenAIServingChat._convert_to_internal_request"
RESPONSES = f"{_HANDLERS}.serving_responses.OpenAIServingResponses.__init__"
ADDITIONAL = "sglang.srt.utils.hf_transformers.common.attach_additional_stop_token_ids"

_TEXT_PARTS = ("text", "input_text")

_ends: WeakKeyDictionary[Any, tuple[str, list[int]]] = WeakKeyDictionary()
"""The template of each known tokenizer, and its ends."""


def install() -> None:
    bound_templates()
    registry.hook(PROCESS, _process, "around")
    registry.hook(CONVERT, _end_answers, "after")
    registry.hook(RESPONSES, _end_responses, "after")
    registry.hook(ADDITIONAL, _no_others, "replace")


def _process(
    original: Callable[..., Any], handler: Any, request: Any, *args: Any, **kw: Any
) -> Any:
    """Render converted messages. Raises ValueError for one that the template leaves out."""
    if request.input_ids is not None or not _renders_by_jinja(handler):
        return original(handler, request, *args, **kw)
    roles = [message.role for message in request.messages]
    template = str(handler.tokenizer_manager.tokenizer.chat_template)
    for message in request.messages:
        _make_plain(message, template)
    last = request.messages[-1]
    if last.role == "assistant" and request._format_add_generation_prompt is None:
        request._format_add_generation_prompt = True  # or SGLang gives the message to the user
        request.continue_final_message |= not last.tool_calls
    result = original(handler, request, *args, **kw)
    _require_written(handler, request, roles)
    return result


def _renders_by_jinja(handler: Any) -> bool:
    templates = handler.template_manager
    return not (
        handler.chat_encoding_spec
        or templates.chat_template_name
        or templates.python_chat_template
        or handler.tokenizer_manager.tokenizer is None
    )


def _make_plain(message: Any, template: str) -> None:
    message.role = role_in(template, message.role)
    parts = message.content
    if isinstance(parts, list) and all(part.type in _TEXT_PARTS for part in parts):
        message.content = "".join(part.text for part in parts)


def _require_written(handler: Any, request: Any, roles: list[str]) -> None:
    from sglang.srt.entrypoints.openai.serving_chat import normalize_assistant_tool_call_arguments

    messages = [m.model_dump(exclude_none=True) for m in request.messages]
    for message in messages:
        message.setdefault("content", "")
        normalize_assistant_tool_call_arguments(message, strict=False)
    given = request.tools if request.tool_choice != "none" else None
    tools = [tool.model_dump() for tool in given or ()] or None

    def render(marked: list[dict[str, Any]]) -> str:
        return str(
            handler.tokenizer_manager.tokenizer.apply_chat_template(
                marked,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                **(request.chat_template_kwargs or {}),
            )
        )

    for number in left_out(messages, render):
        raise ValueError(
            f"messages[{number}]: role={roles[number]!r}: the model's chat template writes nothing of "
            "such a message there, so the model would not read it. Send its words in another "
            "role's message, or elsewhere."
        )


def _end_answers(converted: tuple[Any, Any], handler: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    """Add a run's stop tokens to the request to SGLang."""
    asked, request = converted
    params = asked.sampling_params
    if ends := _stop_tokens(handler):
        params["stop_token_ids"] = sorted({*ends, *(params.get("stop_token_ids") or ())})
    if request.max_completion_tokens == 0:  # which SGLang takes for no limit
        params["max_new_tokens"] = 0
    return converted


def _end_responses(result: Any, handler: Any, *_: Any, **__: Any) -> Any:
    """Add a run's stop tokens to the defaults of /v1/responses."""
    if ends := _stop_tokens(handler):
        known = handler.default_sampling_params.get("stop_token_ids") or ()
        handler.default_sampling_params["stop_token_ids"] = sorted({*ends, *known})
    return result


def _stop_tokens(handler: Any) -> list[int]:
    """Return the tokens that end an answer of a run, as in `onpolicy/run/launch/stop_tokens.py`;
    none where the template has no end of its own, since SGLang stops at the others by itself."""
    manager = handler.tokenizer_manager
    tokenizer = manager.tokenizer
    if tokenizer is None or not _renders_by_jinja(handler):
        return []
    template = str(tokenizer.chat_template)
    if tokenizer not in _ends or _ends[tokenizer][0] != template:
        own = (turn_ends(tokenizer) or TurnEnds()).token_ids
        eos = {tokenizer.eos_token_id} - {None}
        listed = manager.model_config.hf_eos_token_id or set()
        _ends[tokenizer] = template, sorted({*listed, *eos, *own})
    return _ends[tokenizer][1]


def _no_others(tokenizer: Any) -> None:
    tokenizer.additional_stop_token_ids = None
