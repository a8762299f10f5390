"""Refusal of requests that would kill or hang the server for all its users. In every contract.

Stock SGLang checks some fields of a request and passes the others to its scheduler, whose process
dies of values that it cannot index, reshape or decode; a token id outside the vocabulary is one.
Such requests get HTTP 400 with the value, the rule and the remedy instead. They were found by
sending a table of values for every field of /generate to a server (tests/e2e/test_requests.py). Can
go when SGLang checks them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from sglang_patches import registry

NORMALIZE = "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"
VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
TOKENIZE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"

MOST_SAMPLES = 1024
"""The most samples of one request: SGLang prepares all of them before it serves anyone else."""

_INT32 = 2**31 - 1


def install() -> None:
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
