"""What is decided of an optimizer step's tokens over its whole global batch, before its loss.

By what the policy was before the first step of the rollout, so that it is the same however a batch is
cut into ranks and micro-batches. (Peers decide by the loss's own forward pass, within what that holds.)
Entropies are those that aligned engines told, of the distribution that each token was drawn from; or
those of the loss's own pass, where it holds them all (`knows_entropies`). Either saves a pass before it.
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
    """The micro-batches of an optimizer step of this rollout, with the marks that the flags ask for;
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
    """Whose entropies the tokens of a rollout are told apart by: those that engines told, if `told` says
    that they are the trainer's own functions'; those of the loss's own pass; or those of a pass before
    it. Collective."""
    if not config.algorithm.compares_entropies:
        return "nobody"
    untold = any(batch.rollout_entropy is None for step in steps for batch in step)
    if told and not any_data(untold):
        return "rollout"
    return "loss" if knows_entropies(steps, config) else "policy"


def early_entropies(
    source: str, batches: Sequence[PackedBatch], scores: Sequence[Scores] | None
) -> list[Tensor | None]:
    """Those that are known before the loss's own pass; scores: the policy's, if it was asked."""
    if source == "rollout":
        return [batch.rollout_entropy for batch in batches]
    if source == "nobody" or scores is None:
        return [None] * len(batches)
    return [each.entropy for each in scores]


def knows_entropies(steps: Sequence[Sequence[object]], config: TrainConfig) -> bool:
    """Whether the loss's own forward pass has the entropies that the tokens of a rollout are told apart
    by: before its only optimizer step, in the only micro-batch of each rank, on the ranks that have a
    loss, which in a pipeline are not all."""
    return [len(step) for step in steps] == [1] and config.megatron.megatron_pp == 1


def marked_by_own_entropy(
    batch: WeighedBatch, entropy: Tensor, config: TrainConfig
) -> WeighedBatch:
    """A rank's only micro-batch, `marked` by the entropies [R] of its loss's pass too; collective."""
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
    """A number in [0, 1) for each token, by its sample's number in the rollout and its place there."""
    numbers = [n for batch in step for n in (batch.numbers or [-1])]
    lengths = torch.tensor([n for batch in step for n in batch.response_lens])
    keys = torch.tensor(numbers) + (rollout << 32)
    seeds = splitmix64(splitmix64(torch.tensor(seed)) + keys).repeat_interleave(lengths)
    places = torch.cat([torch.arange(int(n)) for n in lengths])
    return uniform_numbers(seeds, places).to(step[0].mask.device)


def _tokens(step: Sequence[WeighedBatch]) -> TokenBatch:
    """All tokens of this rank's part of a step."""
    rollout = _joined(step, "rollout_log_probs")
    lengths = [n for batch in step for n in batch.response_lens]
    return TokenBatch.packed(rollout, rollout, lengths, _joined(step, "mask"))


def _joined(step: Sequence[WeighedBatch], name: str) -> Tensor:
    columns: list[Any] = [getattr(batch, name) for batch in step]
    return torch.cat(columns)
