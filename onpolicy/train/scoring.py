"""How a trainer scores whole sequences, with operators that were checked first."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from onpolicy.contract import NumericsContract
from onpolicy.models.policy import PackedTokens
from onpolicy.ops import Operators, make_operators
from onpolicy.ops.checks.gradient_check import check_gradients
from onpolicy.ops.checks.self_check import self_check
from onpolicy.ops.partial import aligned_side
from onpolicy.train import distributed
from onpolicy.train.engine import ShardedModel
from onpolicy.train.packing import pack

logger = logging.getLogger(__name__)


def checked_operators(
    contract: NumericsContract, num_threads: int, longest: int
) -> tuple[Operators, dict[str, str]]:
    """The operators of a contract, and the digests of their self-check: none under a stock contract.

    longest: the tokens of the largest batch that they are to compute.
    """
    operators = make_operators(contract, num_threads)
    if not contract.shares_model:
        return operators, {}
    logger.info("checking the trainer's operators at the model's shapes")
    aligned = aligned_side(operators)
    digests = self_check(aligned, contract, longest)
    check_gradients(aligned, contract)
    return operators, digests


def score_sequences(
    model: ShardedModel,
    sequences: Sequence[list[int]],
    prompt_lens: Sequence[int],
    temperature: float,
    max_tokens: int,
    device: torch.device,
) -> list[Tensor]:
    """Log-probabilities of every token after a sequence's prompt, float32 [R] per sequence; collective.

    Each data-parallel rank scores a share of them, `max_tokens` at a time.
    """
    lens = [len(s) for s in sequences]
    plan = pack(lens, distributed.data_size(), max_tokens)[distributed.data_rank()]
    batches = [
        PackedTokens.after_prompts(
            [sequences[i] for i in indices] or [[0, 0]],
            [prompt_lens[i] for i in indices] or [1],
            temperature,
            device,
        )
        for indices in plan
    ]
    mine: dict[int, Tensor] = {}
    for indices, scores in zip(plan, model.score(batches), strict=True):
        responses = [lens[i] - prompt_lens[i] for i in indices]
        parts = scores.log_probs[: sum(responses)].cpu().split(responses)
        mine.update(zip(indices, parts, strict=True))
    return list(distributed.gather_by_number(mine).values())
