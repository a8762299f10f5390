"""OpenAI's completions of text or tokens
(https://platform.openai.com/docs/api-reference/completions)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from onpolicy.agents.gateway.calls import Call, Reply
from onpolicy.agents.gateway.fields import CREATED, Fields, usage
from onpolicy.agents.gateway.parsing import offsets
from onpolicy.agents.gateway.protocols import Event
from onpolicy.agents.gateway.refusals import RefusedError, invalid

PATH = "/completions"

error = RefusedError.as_openai


def read(fields: Fields) -> Call:
    """Return the call in a request. Raises RefusedError."""
    fields.refuse("echo", False, because="the answer is what was sampled.")
    fields.refuse("suffix", "", because="the policy goes on after a prompt.")
    log_probs = fields.pop("logprobs")
    if log_probs not in (None, 0) or isinstance(log_probs, bool):
        raise invalid(
            "logprobs", f"{log_probs!r}: only those of sampled tokens are known. Ask for 0."
        )
    call = Call(
        model=fields.need("model", str),
        prompt=_read_prompt(fields.pop("prompt")),
        num_answers=fields.count("n") or 1,
        max_tokens=fields.count("max_tokens"),
        temperature=fields.temperature(),
        stop=fields.texts("stop"),
        streams=fields.take("stream", bool, False),
        streams_usage=fields.streams_usage(),
        log_probs=log_probs is not None,
        token_ids=fields.take("return_token_ids", bool, False),
    )
    fields.end()
    return call


def _read_prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise invalid(
        "prompt", f"must be a text or a list of tokens, one in a request: {prompt!r:.80}."
    )


def answer(call: Call, replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the body of the response."""
    choices = [_choice(call, i, reply) for i, reply in enumerate(replies)]
    return {**_head(call, replies), "choices": choices, "usage": usage(replies)}


def _choice(call: Call, index: int, reply: Reply) -> dict[str, Any]:
    choice = {
        "index": index,
        "text": reply.content,
        "finish_reason": reply.ending,
        "logprobs": _log_probs(reply) if call.log_probs else None,
    }
    if call.token_ids:
        choice["token_ids"] = list(reply.token_ids)
        choice["prompt_token_ids"] = list(reply.prompt_ids)
    return choice


def _log_probs(reply: Reply) -> dict[str, Any]:
    return {
        "tokens": list(reply.token_texts),
        "token_logprobs": list(reply.log_probs),
        "top_logprobs": None,
        "text_offset": list(offsets(reply.token_bytes)),
    }


def events(call: Call, replies: Sequence[Reply]) -> Iterator[Event]:
    """Yield the response as a stream: a chunk for each answer."""
    for i, reply in enumerate(replies):
        yield "", {**_head(call, replies), "choices": [_choice(call, i, reply)]}
    if call.streams_usage:
        yield "", {**_head(call, replies), "choices": [], "usage": usage(replies)}
    yield "", "[DONE]"


def _head(call: Call, replies: Sequence[Reply]) -> dict[str, Any]:
    return {
        "id": f"cmpl-{replies[0].name}",
        "object": "text_completion",
        "created": CREATED,
        "model": call.model,
    }
