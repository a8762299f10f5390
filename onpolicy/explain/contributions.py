"""What each operator contributes to the mismatch, in nats: an integral along the way between engines.

Of both engines every row that an operator was given and made is known. A model in float64, the exact
one, gives a row for each, and the engine's less that is its error: of rounding, of another order of
summation, of other weights. With all errors of an engine put back where they arose, the exact model
computes what that engine computed. So on the way from the trainer's errors to the rollout's, every one
moved by the same share, the exact model goes smoothly from one engine to the other, and its derivative
is a sum over points: gradient times difference of errors. Integrated, the terms add up to the whole
mismatch (Aumann and Shapley, Values of Non-Atomic Games, 1974; Sundararajan et al., arXiv:1703.01365).
The integral is taken by Gauss and Legendre's rule, of which each node takes one forward pass for all
points and tokens; what is missing is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from onpolicy.errors import EngineError
from onpolicy.explain.choices import chosen_experts
from onpolicy.explain.exact import ExactModel
from onpolicy.explain.taps.points import Added, Forced, KeptRows, Point
from onpolicy.explain.taps.policy import packed_keys
from onpolicy.explain.taps.recorder import HEAD
from onpolicy.models.policy import PackedTokens


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one point contributes in one sequence, summed over its tokens, in nats."""

    kl: float
    """To the KL divergence of the rollout's distribution from the trainer's."""

    own_kl: float
    """That part of it which the trainer's operator does not make of the rollout's rows. The rest is how
    both round, which falls otherwise where rows already differ."""

    shift: float
    """To the rollout's log-probabilities less the trainer's."""

    own_shift: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributions:
    """Those of one sequence, and what they should add up to."""

    tokens: int
    kl: float
    """Exact: over the whole vocabulary, from the logits of both, in float64."""

    shift: float
    """The rollout's log-probabilities less the trainer's, in float64 from both logits."""

    log_probs: tuple[Tensor, Tensor]
    """float64 [R]: of both logits, the rollout's and the trainer's."""

    points: dict[Point, Contribution]


Rows = dict[Point, list[Tensor]]

NODES = 4
"""Nodes of Gauss and Legendre's rule. With one the parts of an int8 rollout missed 17 % of the KL."""

LOGITS: Point = ((HEAD, "linear", 0), "made")


def contributions(
    exact: ExactModel,
    batch: PackedTokens,
    rollout: KeptRows,
    train: KeptRows,
    own: KeptRows,
) -> Contributions:
    """Those of one sequence, whose rows both engines have, and in which both chose the same experts.

    own: what the rollout's operators made less what the trainer's make of the same rows. Raises
    EngineError if there are no logits of a token.
    """
    keys = packed_keys(batch.tokens, batch.layout)
    _require_logits(rollout, keys[batch.rows])
    batch = replace(batch, routed_experts=chosen_experts(rollout, keys, len(exact.policy.layers)))
    (theirs, apart), (ours, errors) = (
        _errors(exact, batch, recorded) for recorded in (rollout, train)
    )
    ways = {
        point: [a - b for a, b in zip(apart[point], errors[point], strict=True)] for point in errors
    }
    slopes = _mean_slopes(exact, batch, errors, ways, theirs)
    points = {}
    for point, way in ways.items():
        mine = _own(own, point, keys, batch, way)
        of_kl, of_shift = slopes[point]
        points[point] = Contribution(
            kl=-_sum(of_kl, way),
            own_kl=-_sum(of_kl, mine),
            shift=_sum(of_shift, way),
            own_shift=_sum(of_shift, mine),
        )
    targets = batch.targets[:, None]
    found = theirs.gather(1, targets)[:, 0], ours.gather(1, targets)[:, 0]
    return Contributions(
        tokens=len(targets),
        kl=float((theirs.exp() * (theirs - ours)).sum()),
        shift=float((found[0] - found[1]).sum()),
        log_probs=found,
        points=points,
    )


def _mean_slopes(
    exact: ExactModel, batch: PackedTokens, start: Rows, ways: Rows, theirs: Tensor
) -> dict[Point, tuple[list[Tensor], list[Tensor]]]:
    """The mean gradient along the way, of the KL divergence of `theirs` and of log-probabilities."""
    slopes = {point: (_zeros(way), _zeros(way)) for point, way in ways.items()}
    for node, weight in zip(*leggauss(NODES), strict=True):
        values = {
            point: [
                (b + (1 + node) / 2 * part).requires_grad_()
                for b, part in zip(start[point], way, strict=True)
            ]
            for point, way in ways.items()
        }
        log_probs = exact.log_probs(batch, Added(values=values))
        sums = (
            (theirs.exp() * (theirs - log_probs)).sum(),
            log_probs.gather(1, batch.targets[:, None]).sum(),
        )
        leaves = [leaf for part in values.values() for leaf in part]
        for number, total in enumerate(sums):
            found = iter(
                torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)
            )
            for own in slopes.values():
                for slope in own[number]:
                    slope.add_(next(found), alpha=weight / 2)
    return slopes


def _zeros(rows: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(part) for part in rows]


def _require_logits(rollout: KeptRows, keys: Tensor) -> None:
    head = rollout.get(LOGITS)
    missing = len(keys) if head is None else int((~head.find(keys)[1]).sum())
    if missing:
        raise EngineError(
            f"no logits were recorded of {missing} of {len(keys)} tokens of a sequence, so their "
            "distributions are not known. Leave --sglang-* flags out that change how logits are made."
        )


def _errors(exact: ExactModel, batch: PackedTokens, recorded: KeptRows) -> tuple[Tensor, Rows]:
    forced = Forced(recorded=recorded)
    with torch.no_grad():
        log_probs = exact.log_probs(batch, forced)
    return log_probs, {point: apart for point, _, apart in forced.apart}


def _own(
    own: KeptRows, point: Point, keys: Tensor, batch: PackedTokens, like: Sequence[Tensor]
) -> list[Tensor]:
    if point not in own:
        return _zeros(like)
    if len(like[0]) != len(keys):  # the head
        keys = keys[batch.rows]
    where, found = own[point].find(keys)
    return [torch.where(found[:, None], rows[where], 0) for rows in own[point].rows]


def _sum(gradients: Sequence[Tensor], parts: Sequence[Tensor]) -> float:
    return float(sum((g * part).sum() for g, part in zip(gradients, parts, strict=True)))
