"""Answers `echo` with `logprobs` on /v1/completions with the prompt's log-probabilities too.

Diverges in stock SGLang: it takes `logprobs=0`, the log-probability of each token and of no other, for
none where it comes to the prompt, whose text would then stand in the answer without numbers. And it
drops `prompt_logprobs`, a field of other servers, without a word; here that is refused.
Source: sglang/srt/entrypoints/openai/serving_completions.py. Can go when SGLang tells 0 from None there.
"""

from __future__ import annotations

from typing import Any

from sglang_patches import registry

_HANDLERS = "sglang.srt.entrypoints.openai"
COMPLETION_TARGET = (
    f"{_HANDLERS}.serving_completions.OpenAIServingCompletion._convert_to_internal_request"
)
CHAT_TARGET = f"{_HANDLERS}.serving_chat.OpenAIServingChat._convert_to_internal_request"


def install() -> None:
    for target in (COMPLETION_TARGET, CHAT_TARGET):
        registry.hook(target, _refuse_prompt_logprobs, "before")
    registry.hook(COMPLETION_TARGET, _ask_for_the_prompts, "after")


def _refuse_prompt_logprobs(_: Any, request: Any, raw_request: Any = None) -> None:
    body = getattr(raw_request, "_json", None)  # FastAPI has read it
    if isinstance(body, dict) and body.get("prompt_logprobs") is not None:
        raise ValueError(
            f"prompt_logprobs={body['prompt_logprobs']!r}: SGLang has no such field. Ask "
            "/v1/completions with echo and logprobs, or /generate with logprob_start_len=0."
        )


def _ask_for_the_prompts(
    converted: tuple[Any, Any], _: Any, request: Any, *__: Any, **___: Any
) -> tuple[Any, Any]:
    """What SGLang is asked, and the request that its answer is made for."""
    asked, answered = converted
    if request.echo and request.logprobs is not None:
        asked.logprob_start_len = 0
        answered = answered.model_copy(update={"logprobs": max(1, request.logprobs)})
    return asked, answered
