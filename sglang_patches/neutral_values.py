"""Acceptance of what OpenAI's clients send: neutral values, a limit of no token, any model name.

In every contract. Stock SGLang refuses null where OpenAI allows it for the default, and
`max_tokens` of 0 on /v1/completions, with which `echo` scores a text, as in lm-evaluation-harness.
Source: CompletionRequest and ChatCompletionRequest, sglang/srt/entrypoints/openai/protocol.py. Can
go when SGLang takes both.

Its /v1/responses refuses a name that is not the model's, unlike its other endpoints. A server has
one model, and existing clients may use any name for it, such as "any".
Source: OpenAIServingResponses._validate_model, sglang/srt/entrypoints/openai/serving_responses.py.
Can go when all endpoints of SGLang treat a name alike.
"""

from __future__ import annotations

from typing import Any

from sglang_patches import registry

READ = "sglang.srt.entrypoints.openai.protocol._migrate_deprecated_dp_rank"
"""The function through which both request classes pass a body's fields before validation."""

CONVERT = (
    "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"
    "._convert_to_internal_request"
)

NAME = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses._validate_model"
LISTED = "sglang.srt.entrypoints.openai.utils.to_openai_style_logprobs"


def install() -> None:
    registry.hook(READ, _leave_out_neutral, "after")
    registry.hook(CONVERT, _sample_nothing, "after")
    registry.hook(LISTED, _of_tokens_alone, "after")
    registry.hook(NAME, _accept, "replace")


def _leave_out_neutral(fields: Any, *_: Any) -> Any:
    """Return the fields that are not null; the body that FastAPI has read stays unchanged."""
    if not isinstance(fields, dict):
        return fields
    given = {name: value for name, value in fields.items() if value is not None}
    if "prompt" in given and type(given.get("max_tokens")) is int and given["max_tokens"] == 0:
        given["max_tokens"] = 1  # for validation; `_sample_nothing` sets 0 again
    return given


def _sample_nothing(
    converted: tuple[Any, Any], _: Any, request: Any, raw_request: Any = None
) -> tuple[Any, Any]:
    body = getattr(raw_request, "_json", None)
    if isinstance(body, dict) and type(body.get("max_tokens")) is int and body["max_tokens"] == 0:
        converted[0].sampling_params["max_new_tokens"] = 0
    return converted


def _of_tokens_alone(listed: Any, *_: Any, **__: Any) -> Any:
    """Drop the alternatives of tokens for which none were requested."""
    listed.top_logprobs = listed.top_logprobs[: len(listed.tokens)]
    return listed


def _accept(_: Any, name: str | None) -> None:
    """Return no error for any name."""
