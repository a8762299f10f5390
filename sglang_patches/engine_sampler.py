"""Sampler whose log-probabilities are the trainer's and whose samples depend on the seed alone.

Diverges in stock SGLang: log-probabilities are `log(softmax(x))`, or with deterministic inference
`log_softmax` of logits divided in place; sampling hashes every vocabulary entry, in a kernel that
has no CPU wheel. Here they are `Operators.log_softmax`, the function the trainer calls, and a token
is drawn by `Operators.sample` with one uniform number per (seed, position), so it depends neither
on the batch nor on the engine. SGLang widens logits to float32 on their way; they go back to the
dtype of the projection, since another dtype can be another kernel.

A request with a grammar, top-k, top-p or min-p is sampled from the tokens that these leave, by the
same functions, and its answer holds the set that each token was drawn from: `meta_info.kept_tokens`,
`ops/kept_tokens.py` in base64. Stock SGLang draws from the cut distribution and returns the
log-probability under the whole one.

A server that digests rows also answers, for every token, the digest of the whole vocabulary's
log-probabilities before any cut: `meta_info.row_digests` (`ops/row_digests.py`).

Registered through SGLang's register_sampler_backend under the name that deterministic inference
forces ("pytorch"). Can go when SGLang's sampler can be given a log-softmax.
"""

from __future__ import annotations

import base64
import os
from typing import Any

import torch
from torch import Tensor

from onpolicy.contract import DIGESTS_VARIABLE, NumericsContract
from onpolicy.ops import Operators
from onpolicy.ops.draws import draw
from onpolicy.ops.kept_tokens import ALL, Cut, left, packed, within
from onpolicy.ops.row_digests import row_digests
from sglang_patches import registry
from sglang_patches.engine_grammars import allowed, held

KEPT, DIGESTS = "kept_tokens", "row_digests"


def install(operators: Operators, contract: NumericsContract) -> None:
    from sglang.srt.layers.sampler import register_sampler_backend

    dtype, digests_rows = getattr(torch, contract.dtype), bool(os.environ.get(DIGESTS_VARIABLE))
    register_sampler_backend("pytorch", lambda: _sampler_class()(operators, dtype, digests_rows))
    registry.note("sampler backend pytorch")
    registry.report["digests_rows"] = digests_rows


def _sampler_class() -> type:
    from sglang.srt.layers.sampler import Sampler

    class AlignedSampler(Sampler):
        def __init__(self, operators: Operators, dtype: torch.dtype, digests_rows: bool = False):
            super().__init__()
            self.operators, self.dtype, self.digests_rows = operators, dtype, digests_rows

        def forward(
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: list[int],
            token_ids_logprobs: list[list[int]],
            positions: torch.Tensor,
        ) -> torch.Tensor:
            logits = whole = logits_output.next_token_logits.to(self.dtype)
            kept = _kept(self.operators, logits, sampling_info)
            if kept is not None:
                logits = within(logits, kept)
            _answer_kept(logits_output, kept, sampling_info)
            temperatures = sampling_info.temperatures
            log_probs = self.operators.log_softmax(logits, temperatures)
            if self.digests_rows:
                uncut = kept is None
                rows = log_probs if uncut else self.operators.log_softmax(whole, temperatures)
                _answer(logits_output, DIGESTS, row_digests(rows).tolist())
            numbers = self.operators.uniform(sampling_info.sampling_seed, positions)
            tokens = draw(self.operators, log_probs, numbers, kept)
            if sampling_info.is_any_greedy:
                tokens = torch.where(sampling_info.top_ks == 1, logits.argmax(-1), tokens)
            tokens = tokens.to(torch.int32)
            if return_logprob:
                result = self.output_logprob_processor.compute_logprobs(
                    log_probs, top_logprobs_nums, token_ids_logprobs, tokens
                )
                result.write_output_to(logits_output)
            self._sync_token_ids_across_tp(tokens, sampling_info)
            return tokens

        def compute_logprobs_only(
            self,
            logits_output: Any,
            sampling_info: Any,
            top_logprobs_nums: list[int],
            token_ids_logprobs: list[list[int] | None],
        ) -> None:
            """Compute the log-probabilities for requests that sample no token."""
            logits = logits_output.next_token_logits.to(self.dtype)
            log_probs = self.operators.log_softmax(logits, sampling_info.temperatures)
            result = self.output_logprob_processor.compute_logprobs(
                log_probs, top_logprobs_nums, token_ids_logprobs, logits.argmax(-1)
            )
            result.token_logprobs = None  # of a token that nobody drew
            result.write_output_to(logits_output)

    return AlignedSampler


def _kept(operators: Operators, logits: Tensor, info: Any) -> Tensor | None:
    """Return the tokens left of logits [B, V] in every row: bool [B, V]; None where nothing is cut."""
    return left(operators, logits, info.temperatures, allowed(info, logits), _cut(info))


def _cut(info: Any) -> Cut | None:
    """Return the filters of every row; None where there are none."""
    is_filtered = info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
    if info.is_all_greedy or not is_filtered:
        return None
    is_cut = _is_cut(info)
    settings = (info.top_ks, info.top_ps, info.min_ps)
    neutral = (ALL, 1.0, 0.0)  # for rows that are not cut
    pairs = zip(settings, neutral, strict=True)
    return Cut(*(x.masked_fill(~is_cut, whole)[:, None] for x, whole in pairs))


def _is_cut(info: Any) -> Tensor:
    """Return which requests have a filter, bool [B]: a greedy one (top_k = 1) needs none."""
    filtered = (info.top_ks < ALL) | (info.top_ps < 1) | (info.min_ps > 0)
    asked: Tensor = filtered & (info.top_ks > 1)
    return asked


def _answer_kept(logits_output: Any, kept: Tensor | None, info: Any) -> None:
    """Add the kept tokens to the answers of requests with a grammar or a filter."""
    if kept is None:
        return _answer(logits_output, KEPT, None)
    texts = [base64.b64encode(each).decode() for each in packed(kept)]
    is_cut, within_grammars = _is_cut(info).tolist(), held(info)
    asked = (cut or row in within_grammars for row, cut in enumerate(is_cut))
    told = [text if a else None for a, text in zip(asked, texts, strict=True)]
    return _answer(logits_output, KEPT, told)


def _answer(logits_output: Any, name: str, told: list[Any] | None) -> None:
    """Add a value of each request's token to the answers under this name; None: nothing."""
    others = {k: v for k, v in (logits_output.customized_info or {}).items() if k != name}
    logits_output.customized_info = (others if told is None else {**others, name: told}) or None
