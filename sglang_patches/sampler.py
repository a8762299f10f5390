"""A sampler whose log-probabilities are the trainer's and whose samples depend on the seed alone.

Diverges in stock SGLang: log-probabilities are `log(softmax(x))`, or with deterministic inference
`log_softmax` of logits divided in place; sampling hashes every vocabulary entry, in a kernel that
has no CPU wheel. Here they are `Operators.log_softmax`, the function the trainer calls, and a token
is drawn by `Operators.sample` at one uniform number per (seed, position), so it depends neither on the
batch nor on the engine. SGLang widens logits to float32 on their way; they go back to the dtype that
the projection computed, since another dtype can be another kernel.
Registered through SGLang's register_sampler_backend under the name that deterministic inference
forces ("pytorch"). Can go when SGLang's sampler can be given a log-softmax.
"""

from __future__ import annotations

from typing import Any

import torch

from onpolicy.contract import NumericsContract
from onpolicy.ops import Operators
from sglang_patches import registry


def install(operators: Operators, contract: NumericsContract) -> None:
    from sglang.srt.layers.sampler import register_sampler_backend

    dtype = getattr(torch, contract.dtype)
    register_sampler_backend("pytorch", lambda: _sampler_class()(operators, dtype))
    registry.note("sampler backend pytorch")


def _sampler_class() -> type:
    from sglang.srt.layers.sampler import Sampler

    class AlignedSampler(Sampler):
        def __init__(self, operators: Operators, dtype: torch.dtype):
            super().__init__()
            self.operators, self.dtype = operators, dtype

        def forward(
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: list[int],
            token_ids_logprobs: list[list[int]],
            positions: torch.Tensor,
        ) -> torch.Tensor:
            logits = logits_output.next_token_logits.to(self.dtype)
            log_probs = self.operators.log_softmax(logits, sampling_info.temperatures)
            numbers = self.operators.uniform(sampling_info.sampling_seed, positions)
            tokens = self.operators.sample(log_probs, numbers)
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
            """What requests of no token ask of the one that would come next."""
            logits = logits_output.next_token_logits.to(self.dtype)
            log_probs = self.operators.log_softmax(logits, sampling_info.temperatures)
            result = self.output_logprob_processor.compute_logprobs(
                log_probs, top_logprobs_nums, token_ids_logprobs, logits.argmax(-1)
            )
            result.token_logprobs = None  # of a token that nobody drew
            result.write_output_to(logits_output)

    return AlignedSampler
