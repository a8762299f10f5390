"""Selection of an optimizer step's tokens over its whole global batch, before its loss.

Tokens are selected by the policy before the first step of the rollout, so that the selection does not
depend on how a batch is split into ranks and micro-batches. (Other frameworks select by the loss's own
forward pass, within one micro-batch.) Entropies come from aligned engines, which report them for the
distribution that each token was drawn from, or from the loss's own pass, where it holds them all
(`knows_entropies`). Either saves a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fallback_correction.tokens import TokenBatch
from onpolicy.algorithm.selection import clip_cov, covariances, kl_cov, top_entropy
from onpolicy.config import TrainConfig
from onpolicy.ops.log_probs import Scores
from onpolicy.ops.uniform_numbers import splitmix64, uniform_numbers
from onpolicy.train.batch import PackedBatch, WeighedBatch
from onpolicy.train.correction import step_shares
from onpolicy.train.distributed import any_data, gather_vectors


def marked(step: Sequence[WeighedBatch], config: TrainConfig, rollout: int) -> list[WeighedBatch]:
    """Add the marks that the flags select to the micro-batches of an optimizer step of this rollout;
    collective."""
    algorithm = config.algorithm
    columns: dict[str, Tensor] = {}
    if algorithm.positive_nll_coef:
        columns["positive_shares"] = _positive_shares(step, config)
    if algorithm.compares_entropies and step[0].entropy is not None:
        columns["learnt"] = _top_entropy(step, config)
    if algorithm.compares_covariances:
        columns |= _by_covariance(step, config, rollout, columns)
    if not columns:
        return list(step)
    lengths = [len(batch.mask) for batch in step]
    parts = {name: column.split(lengths) for name, column in columns.items()}
    return [
        replace(batch, **{name: part[i] for name, part in parts.items()})
        for i, batch in enumerate(step)
    ]


def entropies_from(
    steps: Sequence[Sequence[PackedBatch]], config: TrainConfig, *, told: bool
) -> Literal["nobody", "rollout", "loss", "policy"]:
    """Return the source of the entropies that select tokens; collective.

    It is the rollout, if `told` says that engines computed them with the trainer's operators; the
    loss's own pass; or a pass of the policy before it.
    """
    if not config.algorithm.compares_entropies:
        return "nobody"
    untold = any(batch.rollout_entropy is None for step in steps for batch in step)
    if told and not any_data(untold):
        return "rollout"
    return "loss" if knows_entropies(steps, config) else "policy"


def early_entropies(
    source: str, batches: Sequence[PackedBatch], scores: Sequence[Scores] | None
) -> list[Tensor | None]:
    """Return the entropies known before the loss's own pass; scores: the policy's, if it was asked."""
    if source == "rollout":
        return [batch.rollout_entropy for batch in batches]
    if source == "nobody" or scores is None:
        return [None] * len(batches)
    return [each.entropy for each in scores]


def knows_entropies(steps: Sequence[Sequence[object]], config: TrainConfig) -> bool:
    """Return whether the loss's own forward pass has all entropies that select tokens: in the only
    optimizer step of a rollout, with one micro-batch for each rank, and without a pipeline, where some
    ranks have no loss."""
    return [len(step) for step in steps] == [1] and config.megatron.megatron_pp == 1


def marked_by_own_entropy(
    batch: WeighedBatch, entropy: Tensor, config: TrainConfig
) -> WeighedBatch:
    """Mark a rank's only micro-batch by the entropies [R] of its loss's pass too; collective."""
    batch = replace(batch, entropy=entropy.detach())
    learnt = _top_entropy([batch], config)
    return replace(batch, learnt=learnt if batch.learnt is None else learnt & batch.learnt)


def _top_entropy(step: Sequence[WeighedBatch], config: TrainConfig) -> Tensor:
    share = config.algorithm.top_entropy_quantile
    return top_entropy(_tokens(step), _joined(step, "entropy"), share, gather_vectors)


def _positive_shares(step: Sequence[WeighedBatch], config: TrainConfig) -> Tensor:
    above = config.algorithm.positive_nll_above
    is_positive = [s.sample.reward > above for batch in step for s in batch.samples]
    tokens = _tokens(step)
    positive = tokens.spread(torch.tensor(is_positive, device=tokens.mask.device))
    return step_shares(replace(tokens, mask=tokens.mask & positive), step, config)


def _by_covariance(
    step: Sequence[WeighedBatch], config: TrainConfig, rollout: int, found: dict[str, Tensor]
) -> dict[str, Tensor]:
    algorithm, tokens = config.algorithm, _tokens(step)
    old = _joined(step, "old_log_probs")
    values = covariances(tokens, old, _joined(step, "advantages"), gather_vectors)
    draws = _draws(step, config.seed, rollout)
    columns = {}
    if share := algorithm.clip_cov_ratio:
        bounds = algorithm.clip_cov_lb, algorithm.clip_cov_ub
        left_out = clip_cov(tokens, values, draws, share, bounds, gather_vectors)
        columns["learnt"] = found.get("learnt", tokens.mask) & ~left_out
    if share := algorithm.kl_cov_ratio:
        columns["restrained"] = kl_cov(tokens, values, draws, share, gather_vectors)
    return columns


def _draws(step: Sequence[WeighedBatch], seed: int, rollout: int) -> Tensor:
    """Return a number in [0, 1) for each token, from its sample's number in the rollout and its
    position."""
    numbers = [n for batch in step for n in (batch.numbers or [-1])]
    lengths = torch.tensor([n for batch in step for n in batch.response_lens])
    # The rollout's number fills the high bits, so that no two rollouts share a key.
    keys = torch.tensor(numbers) + (rollout << 32)
    seeds = splitmix64(splitmix64(torch.tensor(seed)) + keys).repeat_interleave(lengths)
    places = torch.cat([torch.arange(int(n)) for n in lengths])
    return uniform_numbers(seeds, places).to(step[0].mask.device)


def _tokens(step: Sequence[WeighedBatch]) -> TokenBatch:
    """Return all tokens of this rank's part of a step."""
    rollout = _joined(step, "rollout_log_probs")
    lengths = [n for batch in step for n in batch.response_lens]
    return TokenBatch.packed(rollout, rollout, lengths, _joined(step, "mask"))


def _joined(step: Sequence[WeighedBatch], name: str) -> Tensor:
    columns: list[Any] = [getattr(batch, name) for batch in step]
    return torch.cat(columns)
