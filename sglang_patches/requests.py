"""Refusal of requests that are not the policy's or would kill the server, and seeds for the others.

A request with a penalty gets a 400 answer that says so, instead of tokens: the returned
log-probability belongs to the temperature-scaled softmax, restricted to the tokens that a grammar,
top-k, top-p and min-p leave (`engine_sampler.py`), and the sample would not be on-policy.

In every contract: stock SGLang checks some fields of a request and passes the others to its
scheduler, whose process dies or hangs, for all users, of values that it cannot index, reshape or
decode. Such requests get HTTP 400 instead. They were found by sending a table of values for every
field of /generate to a server (tests/e2e/test_requests.py). Can go when SGLang checks them.

SGLang's deterministic inference takes the same seed, 42, for every request that brings none, so two
people who ask the same get the same "sample". Here the n-th such request gets the n-th number of a
generator seeded with the server's --random-seed (`onpolicy serve --seed`). SGLang also gives all n
copies of a request (`sampling_params.n`) its seed, so all n samples are equal. Here the first copy
keeps it, and every further one has `next_seed` of the copy before it.
Source: sglang/srt/sampling/sampling_batch_info.py. Can go when SGLang draws seeds itself, and
derives them for copies.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onpolicy.ops.uniform_numbers import splitmix64
from sglang_patches import registry

TARGET = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
COMPLETION_TARGET = (
    "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._validate_request"
)

CHAT_TARGETS = tuple(
    f"sglang.srt.entrypoints.openai.protocol.{each}.to_sampling_params"
    for each in ("ChatCompletionRequest", "ResponsesRequest")
)

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
TOKENIZE = f"{_MANAGER}._create_tokenized_object"
VALIDATE = f"{_MANAGER}._validate_one_request"
SEND = f"{_MANAGER}._send_one_request"
NORMALIZE = "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"

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


def keep_true() -> None:
    registry.hook(TARGET, _refuse_others, "before")
    registry.hook(COMPLETION_TARGET, _refuse_completion, "after")
    for target in CHAT_TARGETS:
        registry.hook(target, _refuse_format_beside_tools, "before")
    registry.hook(TOKENIZE, _refuse_positions, "after")
    registry.hook(TOKENIZE, SeedGiver(), "after")
    registry.hook(SEND, _give_copies_seeds, "before")


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


def _refuse_format_beside_tools(request: Any, *_: Any, **__: Any) -> None:
    """Refuse a format that would keep every answer from calling a tool, as SGLang does for forced
    calls alone (vllm-project/vllm#39929, sgl-project/sglang#25777)."""
    text = getattr(request, "text", None)  # of /v1/responses
    form = getattr(request, "response_format", None) or getattr(text, "format", None)
    kind = getattr(form, "type", "")
    field = "regex" if getattr(request, "regex", None) else ""
    if kind in ("json_schema", "json_object"):
        field = f"{'text.format' if text is not None else 'response_format'}.type={kind}"
    if field and request.tools and request.tool_choice == "auto":
        raise ValueError(
            f"{field} beside tools: every answer would be held to it, and could call none of them. Give "
            "tool_choice=none, or leave one of the two out; a session (`onpolicy serve --sessions`) "
            "answers with a call or in the format."
        )


def _refuse_positions(tokenized: Any, *_: Any, **__: Any) -> None:
    """Refuse scores at chosen positions of a prompt, which SGLang computes with its own operators."""
    for name in ("token_indices_to_pool", "multi_item_delimiter_indices"):
        if (positions := getattr(tokenized, name, None)) is not None:
            raise ValueError(
                f"{name}={positions!r}: not available in true-on-policy mode, because SGLang scores "
                "chosen positions by operators of its own. Ask for the log-probabilities of the whole "
                "prompt with logprob_start_len, or serve without the contract."
            )


MOST_SAMPLES = 1024
"""The most samples of one request: SGLang prepares all of them before it serves anyone else."""

_INT32 = 2**31 - 1


def refuse_harmful() -> None:
    for target in (NORMALIZE, VALIDATE, TOKENIZE):
        registry.hook(target, _blame_the_request, "around")
    registry.hook(NORMALIZE, _check_samples, "before")
    registry.hook(TOKENIZE, _check_prompt, "before")
    registry.hook(TOKENIZE, _check_tokenized, "after")


def _blame_the_request(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Report errors of SGLang here as errors of the request; its own ValueErrors say so already."""
    try:
        return original(*args, **kwargs)
    except (TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(f"the request cannot be read: {error}.") from error


def _check_samples(request: Any, *_: Any, **__: Any) -> None:
    given = request.sampling_params
    for params in given if isinstance(given, list) else [given or {}]:
        _require_within("sampling_params.n", params.get("n", 1), 1, MOST_SAMPLES)


def _check_prompt(
    manager: Any, request: Any, text: Any, input_ids: Sequence[int] | None, *_: Any, **__: Any
) -> None:
    if input_ids is not None and not len(input_ids) and not request.session_params:
        raise ValueError(
            "input_ids=[]: a prompt has at least one token. Leave it out of the batch."
        )
    for position, token in enumerate(input_ids or ()):
        _require_token(f"input_ids[{position}]", token, manager.model_config.vocab_size)


def _require_token(name: str, token: Any, vocab_size: int) -> None:
    if type(token) is not int or not 0 <= token < vocab_size:
        raise ValueError(
            f"{name}={token!r}: token ids are integers from 0 to {vocab_size - 1}, the vocabulary of "
            "this model. Encode the prompt with the model's own tokenizer."
        )


def _check_tokenized(tokenized: Any, manager: Any, *_: Any, **__: Any) -> None:
    vocab_size = manager.model_config.vocab_size
    _require_within("sampling_params.top_k", tokenized.sampling_params.top_k, 1, _INT32)
    if getattr(tokenized, "return_logprob", False):
        _require_within("logprob_start_len", tokenized.logprob_start_len, -1, None)
        _require_within("top_logprobs_num", tokenized.top_logprobs_num, 0, vocab_size)
    _require_decodable(tokenized)


def _require_within(name: str, value: Any, least: int, most: int | None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise ValueError(f"{name}={value!r}: must be an integer {limits}. Give such a value.")


def _require_decodable(tokenized: Any) -> None:
    """Raise ValueError for a request that the scheduler's process could not decode."""
    from sglang.srt.managers.io_struct import msgpack_encode
    from sglang.srt.managers.utils import msgpack_decode_explained

    sent = copy.copy(tokenized)
    sent.time_stats = None  # not of the request, and pickled on its way
    sent.wrap_pickle_fields()
    try:
        msgpack_decode_explained(msgpack_encode(sent))
    except Exception as error:
        raise ValueError(
            f"{error}. Give the field a value of the type that SGLang documents."
        ) from error


_GREEDY = 1
"""SGLang's top_k of a request of temperature 0; health checks are such requests."""


class SeedGiver:
    """A hook for the one process that all requests of a server pass through."""

    def __init__(self) -> None:
        self._generator: random.Random | None = None

    def __call__(self, tokenized: Any, manager: Any, *_: Any, **__: Any) -> Any:
        params = tokenized.sampling_params
        if params.sampling_seed is None and params.top_k != _GREEDY:
            if self._generator is None:
                self._generator = random.Random(manager.server_args.random_seed)
            params.sampling_seed = self._generator.getrandbits(63)
        return tokenized


def _give_copies_seeds(manager: Any, tokenized: Any, *_: Any, **__: Any) -> None:
    """Give each copy its seed; they share parameters, which get the seed of the next."""
    shared = tokenized.sampling_params
    # Ahead of the copies SGLang sends their prompt alone, with parameters of its own. Greedy requests
    # draw nothing, and are left without a seed.
    if shared.n == 1 or shared.max_new_tokens == 0 or shared.sampling_seed is None:
        return
    tokenized.sampling_params = copy.copy(shared)
    shared.sampling_seed = next_seed(shared.sampling_seed)


def next_seed(seed: int) -> int:
    """Return the seed of the copy after the one with `seed`, in [0, 2**63)."""
    return int(splitmix64(torch.tensor(seed))) & ((1 << 63) - 1)
