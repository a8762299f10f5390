"""Refusal of requests whose log-probabilities would not be the policy's own.

The returned log-probability is that of the temperature-scaled softmax, restricted to the tokens
that a grammar, top-k, top-p and min-p leave (`sampler.py`). A penalty makes the sampling
distribution another one, so the sample would not be on-policy; a request with one gets a 400 answer
that says so, instead of tokens.
"""

from __future__ import annotations

from typing import Any

from sglang_patches import registry
from sglang_patches.grammars import NUM_BEGUN

TARGET = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
COMPLETION_TARGET = (
    "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._validate_request"
)

TOKENIZE_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"

_NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "logit_bias": None,
    "ebnf": None,
    "beam_width": None,
    "watermark": None,
}

_REASON = (
    "not available in true-on-policy mode, where a token is sampled from softmax(logits / temperature), "
    "or what regex, json_schema, structural_tag, top_k, top_p and min_p leave of it, and from nothing "
    "else, so that its log-probability is the trainer's to the last bit. Leave it out, or serve without "
    "the contract."
)


def install() -> None:
    registry.hook(TARGET, _refuse_others, "before")
    registry.hook(COMPLETION_TARGET, _refuse_completion, "after")
    registry.hook(TOKENIZE_TARGET, _refuse_positions, "after")
    registry.hook(TOKENIZE_TARGET, _check_begun, "after")


def _refuse_others(params: Any, *_: Any, **__: Any) -> None:
    if not any((params.logit_bias or {}).values()):  # empty, or zeros only
        params.logit_bias = None
    if params.watermark is not None and not (params.watermark.enabled or params.watermark.key):
        params.watermark = None
    asked = [
        name
        for name, neutral in _NEUTRAL.items()
        if getattr(params, name, neutral) not in (neutral, [])
    ]
    if asked:
        values = ", ".join(f"{name}={getattr(params, name)!r}" for name in asked)
        raise ValueError(f"{values}: {_REASON}")


def _refuse_completion(problem: str | None, handler: Any, request: Any) -> str | None:
    """Refuse fields that SGLang's /v1/completions would ignore."""
    if request.best_of not in (None, request.n):
        return f"best_of={request.best_of}: {_REASON}"
    if request.suffix and handler.template_manager.completion_template_name is None:
        return (
            f"suffix={request.suffix!r:.60}: the server would not read it, having no template for what "
            "stands around a completion. Leave it out."
        )
    return problem


def _refuse_positions(tokenized: Any, *_: Any, **__: Any) -> None:
    """Refuse scores at chosen positions of a prompt, which SGLang computes with its own operators."""
    for name in ("token_indices_to_pool", "multi_item_delimiter_indices"):
        if (positions := getattr(tokenized, name, None)) is not None:
            raise ValueError(
                f"{name}={positions!r}: not available in true-on-policy mode, because SGLang scores "
                "chosen positions by operators of its own. Ask for the log-probabilities of the whole "
                "prompt with logprob_start_len, or serve without the contract."
            )


def _check_begun(tokenized: Any, *_: Any, **__: Any) -> None:
    """Check the number of tokens of an answer within a grammar that the prompt holds
    (`grammars.py`)."""
    count = (tokenized.sampling_params.custom_params or {}).get(NUM_BEGUN, 0)
    if type(count) is not int or not 0 <= count < len(tokenized.input_ids):
        raise ValueError(
            f"{NUM_BEGUN}={count!r}: must be the number of the prompt's last tokens that an answer "
            "begins with, and the prompt has one more at least. Leave it out where an answer begins."
        )
