"""Log-probabilities of a prompt's tokens as the trainer computes them, at the request's
temperature.

Diverges in stock SGLang: `log_softmax` of the logits as PyTorch computes it, or with a fast path
differences from a logsumexp, and always at temperature 1. Here they are `Operators.log_softmax`, as
in sampler.py, so that a response that is sent back as a prompt has the log-probabilities it was
sampled with, and another's response those that the trainer would give it.

Logits come in chunks of as many rows as the trainer's, on all tensor-parallel ranks alike.

Source: InputLogprobProcessor.forward, sglang/srt/layers/logprob_processor.py. Can go when it can be
given a log-softmax.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
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
        """Return the answers for the prompts' rows, and the logits [B, V] of the rows to sample
        from.

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
