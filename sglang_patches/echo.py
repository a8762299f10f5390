"""Answers `echo` with `logprobs` on /v1/completions with the prompt's log-probabilities too.

Diverges in stock SGLang: it takes `logprobs=0`, the log-probability of each token and of no other, for
none where it comes to the prompt, whose text would then stand in the answer without numbers.
Source: sglang/srt/entrypoints/openai/serving_completions.py. Can go when SGLang tells 0 from None there.
"""

from __future__ import annotations

from typing import Any

from sglang_patches import registry

TARGET = (
    "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion."
    "_convert_to_internal_request"
)


def install() -> None:
    registry.hook(TARGET, _ask_for_the_prompts, "after")


def _ask_for_the_prompts(
    converted: tuple[Any, Any], _: Any, request: Any, *__: Any, **___: Any
) -> tuple[Any, Any]:
    """What SGLang is asked, and the request that its answer is made for."""
    asked, answered = converted
    if request.echo and request.logprobs is not None:
        asked.logprob_start_len = 0
        answered = answered.model_copy(update={"logprobs": max(1, request.logprobs)})
    return asked, answered
