"""Answers about a prompt's tokens on the OpenAI endpoints: `prompt_logprobs`, a field of vLLM's, on
/v1/completions and /v1/chat/completions, and `echo` with `logprobs` on the former.

SGLang silently drops the field. The answer has vLLM's form: for each token of the prompt the
numbers of the token itself and of the requested number of likeliest tokens, and null for the first.
The log-probabilities come from prompt_log_probs.py. A rank is null where SGLang does not compute
it: the token is none of the likeliest. Streams, as vLLM's, have no place for the answer.

Source: `prompt_logprobs` in vLLM's documentation of its OpenAI-compatible server. Can go when
SGLang has the field.

With `echo` SGLang treats `logprobs=0`, the log-probability of each token and of no other, as None
for the prompt, whose text would then be in the answer without numbers.

Source: sglang/srt/entrypoints/openai/serving_completions.py. Can go when SGLang tells 0 from None
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sglang_patches import registry

FIELD = "prompt_logprobs"

_HANDLERS = "sglang.srt.entrypoints.openai"
_COMPLETIONS = f"{_HANDLERS}.serving_completions.OpenAIServingCompletion"
_CHAT = f"{_HANDLERS}.serving_chat.OpenAIServingChat"
COMPLETION_TARGET = f"{_COMPLETIONS}._convert_to_internal_request"
CHAT_TARGET = f"{_CHAT}._convert_to_internal_request"
COMPLETION_ANSWER_TARGET = f"{_COMPLETIONS}._build_completion_response"
CHAT_ANSWER_TARGET = f"{_CHAT}._build_chat_response"


def install() -> None:
    registry.hook(COMPLETION_TARGET, _echo, "after")
    for target in (COMPLETION_TARGET, CHAT_TARGET):
        registry.hook(target, _ask, "after")
    registry.hook(COMPLETION_ANSWER_TARGET, _answer_completion, "after")
    registry.hook(CHAT_ANSWER_TARGET, _answer_chat, "after")


def _echo(
    converted: tuple[Any, Any], _: Any, request: Any, *__: Any, **___: Any
) -> tuple[Any, Any]:
    """Return the request to SGLang, and the request that its answer is made for."""
    asked, answered = converted
    if request.echo and request.logprobs is not None:
        asked.logprob_start_len = 0
        answered = answered.model_copy(update={"logprobs": max(1, request.logprobs)})
    return asked, answered


def _ask(converted: tuple[Any, Any], _: Any, request: Any, raw_request: Any = None) -> Any:
    """Return the request to SGLang, and the original, which keeps the field for its answer."""
    body = getattr(raw_request, "_json", None)  # FastAPI has read it
    count = body.get(FIELD) if isinstance(body, dict) else None
    if count is None:
        return converted
    asked, answered = converted
    _require_answerable(count, asked)
    asked.top_logprobs_num = max(count, asked.top_logprobs_num)
    asked.return_logprob = asked.return_prompt_token_ids = True
    asked.logprob_start_len = 0
    return asked, answered.model_copy(update={FIELD: count})


def _require_answerable(count: Any, asked: Any) -> None:
    if type(count) is not int or count < 0:
        raise ValueError(f"{FIELD}={count!r}: must be a whole number of alternatives, from 0 on.")
    if asked.stream:
        raise ValueError(f"{FIELD}={count}: a stream has no place for them. Ask without stream.")
    if asked.return_logprob and count not in (0, asked.top_logprobs_num):
        raise ValueError(
            f"{FIELD}={count}: SGLang answers with as many alternatives for the prompt as for the "
            f"response, of which {asked.top_logprobs_num} were asked for. Give that number, or 0."
        )


def _answer_completion(answer: Any, handler: Any, request: Any, ret: Any, _: Any) -> Any:
    """Add to every choice the numbers of its own prompt."""
    if getattr(request, FIELD, None) is None:
        return answer
    body = answer.model_dump(mode="json", by_alias=True)
    for choice, item in zip(body["choices"], ret, strict=True):
        choice[FIELD] = _prompt_logprobs(handler, request, item)
    return _response(body)


def _answer_chat(answer: Any, handler: Any, request: Any, ret: Any, _: Any) -> Any:
    """Add the numbers of the prompt that all choices share."""
    if getattr(request, FIELD, None) is None:
        return answer
    body = answer.model_dump(mode="json", by_alias=True)
    return _response({**body, FIELD: _prompt_logprobs(handler, request, ret[0])})


def _response(body: dict[str, Any]) -> Any:
    from fastapi.responses import JSONResponse

    return JSONResponse(body)


def _prompt_logprobs(handler: Any, request: Any, item: dict[str, Any]) -> list[Any]:
    """Return the answer for one prompt: for each token None, or a JSON object of entries by token
    id."""
    decode = handler.tokenizer_manager.tokenizer.decode
    return [
        entries
        and {
            str(token): {"logprob": log_prob, "rank": rank, "decoded_token": decode([token])}
            for token, (log_prob, rank) in entries.items()
        }
        for entries in _entries(
            item["prompt_token_ids"], item["meta_info"], getattr(request, FIELD)
        )
    ]


def _entries(
    token_ids: Sequence[int], meta: dict[str, Any], count: int
) -> Iterator[dict[int, tuple[float, int | None]] | None]:
    """Yield for each token the log-probability and the rank of the `count` likeliest and of itself."""
    likeliest = meta.get("input_top_logprobs") or [()] * len(token_ids)
    rows = zip(token_ids, meta["input_token_logprobs"], likeliest, strict=True)
    for token, (log_prob, *_), top in rows:
        if log_prob is None:
            yield None
            continue
        entries: dict[int, tuple[float, int | None]] = {
            other: (value, rank) for rank, (value, other, *_) in enumerate((top or ())[:count], 1)
        }
        entries.setdefault(token, (log_prob, None))
        yield entries
