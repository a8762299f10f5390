"""Log-probabilities of a prompt's tokens, computed as by the trainer, and their answers to clients.

Diverges in stock SGLang: `log_softmax` of the logits as PyTorch computes it, or with a fast path
differences from a logsumexp, and always at temperature 1. Here they are `Operators.log_softmax` at
the request's temperature, as in engine_sampler.py, so that a response that is sent back as a prompt
has the log-probabilities it was sampled with. Logits come in chunks of as many rows as the trainer's.
Source: InputLogprobProcessor.forward, sglang/srt/layers/logprob_processor.py. Can go when it can be
given a log-softmax.

It silently drops `prompt_logprobs`, a field of vLLM's, on /v1/completions and /v1/chat/completions.
The answer has vLLM's form: for each token of the prompt the numbers of the token itself and of the
requested number of likeliest tokens, and null for the first. A rank is null where SGLang does not
compute it: the token is none of the likeliest. Streams, as vLLM's, have no place for the answer.
Source: `prompt_logprobs` in vLLM's documentation of its OpenAI-compatible server. Can go when
SGLang has the field.

With `echo`, on /v1/completions, it treats `logprobs=0`, the log-probability of each token and of no
other, as None for the prompt, whose text would then be in the answer without numbers.
Source: sglang/srt/entrypoints/openai/serving_completions.py. Can go when SGLang tells 0 from None
there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onpolicy.contract import NumericsContract
from onpolicy.ops import Operators
from sglang_patches import registry

TARGET = "sglang.srt.layers.logprob_processor.InputLogprobProcessor.forward"
METADATA_TARGET = "sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch"


def install(operators: Operators, contract: NumericsContract) -> None:
    dtype = getattr(torch, contract.dtype)

    def forward(
        _: Any,
        pruned_states: Tensor,
        sample_indices: Tensor,
        input_logprob_indices: Tensor,
        token_to_seq_idx: Sequence[int],
        lm_head: Any,
        get_logits_fn: Callable[..., Tensor],
        logits_metadata: Any,
        skip_chunking_for_dp_attn: bool = False,
    ) -> tuple[Any, Tensor]:
        """Return the answers for the prompts' rows, and the logits [B, V] of the rows to sample.

        pruned_states: [N, K], of sequences one after the other; both indices: int64, sorted.
        """
        sampled, wanted = sample_indices.tolist(), input_logprob_indices.tolist()
        answers, logits_to_sample = PromptLogProbs(logits_metadata), []
        size = operators.rows_per_chunk(lm_head.org_vocab_size)
        for start in range(0, len(pruned_states), size):
            rows = slice(start, start + size)
            logits = get_logits_fn(
                pruned_states[rows], lm_head, logits_metadata, use_logits_buffer=False
            )
            logits_to_sample.append(logits[_within(sampled, rows)])
            of_prompts = _within(wanted, rows)
            sequences = [token_to_seq_idx[start + row] for row in of_prompts]
            if sequences:
                temperatures = logits_metadata.temperature[sequences]
                chosen = logits[of_prompts].to(dtype)
                answers.add(operators.log_softmax(chosen, temperatures), sequences)
        return answers.result(), torch.cat(logits_to_sample)

    registry.hook(METADATA_TARGET, _keep_temperature, "after")
    registry.hook(TARGET, forward, "replace")
    registry.hook(COMPLETION_TARGET, _echo, "after")
    for target in (COMPLETION_TARGET, CHAT_TARGET):
        registry.hook(target, _ask, "after")
    registry.hook(COMPLETION_ANSWER_TARGET, _answer_completion, "after")
    registry.hook(CHAT_ANSWER_TARGET, _answer_chat, "after")


def _keep_temperature(metadata: Any, _: Any, batch: Any) -> None:
    if batch.sampling_info is not None:
        metadata.temperature = batch.sampling_info.temperatures  # float32 [B, 1]


def _within(indices: list[int], rows: slice) -> list[int]:
    """Return the sorted `indices` within `rows`, relative to its start."""
    part = indices[bisect_left(indices, rows.start) : bisect_left(indices, rows.stop)]
    return [index - rows.start for index in part]


class PromptLogProbs:
    """The answers about the prompts of one batch's requests; `metadata` has the requests."""

    def __init__(self, metadata: Any) -> None:
        count = len(metadata.extend_seq_lens_cpu)
        self.metadata, self.num_rows = metadata, 0
        self.of_tokens: list[Tensor] = []
        self.likeliest, self.of_ids = Lists(count), Lists(count)

    def add(self, log_probs: Tensor, sequences: list[int]) -> None:
        """Add the next rows: float32 [M, V], and the sequence of each."""
        tokens = self.metadata.extend_input_logprob_token_ids_gpu
        targets = tokens[self.num_rows : self.num_rows + len(sequences)].to(torch.int64)
        self.of_tokens.append(log_probs.gather(1, targets[:, None])[:, 0])
        self.num_rows += len(sequences)
        if self.metadata.extend_return_top_logprob:
            numbers = self.metadata.top_logprobs_nums
            values, ids = (part.tolist() for part in log_probs.topk(max(numbers), dim=-1))
            for sequence, *row in zip(sequences, values, ids, strict=True):
                self.likeliest.add(sequence, *(part[: numbers[sequence]] for part in row))
        if self.metadata.extend_token_ids_logprob:
            for sequence, row in zip(sequences, log_probs, strict=True):
                if (asked := self.metadata.token_ids_logprobs[sequence]) is not None:
                    self.of_ids.add(sequence, row[asked].tolist(), asked)

    def result(self) -> Any:
        """Return everything as SGLang's LogprobResult."""
        from sglang.srt.layers.logprob_processor import LogprobResult

        result = LogprobResult(token_logprobs=torch.cat(self.of_tokens))
        if self.metadata.extend_return_top_logprob:
            result.top_logprobs_val = self.likeliest.values
            result.top_logprobs_idx = self.likeliest.ids
        if self.metadata.extend_token_ids_logprob:
            result.token_ids_logprobs_val = self.of_ids.values
            result.token_ids_logprobs_idx = self.of_ids.ids
        return result


class Lists:
    """Log-probabilities and token ids, a list of rows for each sequence, as SGLang sends them on."""

    def __init__(self, num_sequences: int):
        self.values: list[list[list[float]]] = [[] for _ in range(num_sequences)]
        self.ids: list[list[list[int]]] = [[] for _ in range(num_sequences)]

    def add(self, sequence: int, values: list[float], ids: list[int]) -> None:
        self.values[sequence].append(values)
        self.ids[sequence].append(ids)


FIELD = "prompt_logprobs"

_HANDLERS = "sglang.srt.entrypoints.openai"
_COMPLETIONS = f"{_HANDLERS}.serving_completions.OpenAIServingCompletion"
_CHAT = f"{_HANDLERS}.serving_chat.OpenAIServingChat"
COMPLETION_TARGET = f"{_COMPLETIONS}._convert_to_internal_request"
CHAT_TARGET = f"{_CHAT}._convert_to_internal_request"
COMPLETION_ANSWER_TARGET = f"{_COMPLETIONS}._build_completion_response"
CHAT_ANSWER_TARGET = f"{_CHAT}._build_chat_response"


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
    """Return for each token of a prompt None, or a JSON object of entries by token id."""
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
