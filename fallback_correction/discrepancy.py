"""The discrepancy-constrained advantage of DC-GRPO (arXiv 2606.08779), which is lower for tokens on
which the engines disagree.

With r = log pi_train - log pi_rollout of a sampled token and rho = exp(r), its advantage A becomes A -
lambda * delta, where delta measures the disagreement and lambda follows the batch mean of delta around
a budget.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fallback_correction.config.discrepancy_settings import DiscrepancyConfig, Measure
from fallback_correction.ranges import require_choice
from fallback_correction.tokens import (
    Gather,
    NonfiniteError,
    TokenBatch,
    alone,
    exact_sum,
    global_sequence_mean,
    global_token_mean,
)


@torch.no_grad()
def discrepancy(batch: TokenBatch, measure: Measure = "difference") -> Tensor:
    """Return the engines' distance on every token (eq. 2): float32 [N], 0 where it does not count.

    Raises NonfiniteError if a counting token has no finite log-probabilities, or |rho - 1| overflows.
    """
    require_choice("measure", measure, Measure)
    _check_finite("train_log_probs", batch.train_log_probs, batch.mask)
    _check_finite("rollout_log_probs", batch.rollout_log_probs, batch.mask)
    # In float64, and without subtracting two exponentials: this rounds away a last bit that depends
    # on a token's place in a vectorised exp, and equal log-probabilities give exactly 0.
    train, rollout = batch.train_log_probs.double(), batch.rollout_log_probs.double()
    r = train - rollout
    if measure == "difference":
        delta = torch.maximum(train, rollout).exp() * -torch.expm1(-r.abs())
    else:
        delta = torch.expm1(r).abs() if measure == "ratio" else r.abs()
    delta = torch.where(batch.mask, delta, 0).float()
    _check_finite(f"{measure} discrepancy", delta, batch.mask)
    return delta


def _check_finite(name: str, values: Tensor, mask: Tensor) -> None:
    bad = (mask & ~values.isfinite()).nonzero()
    if len(bad):
        i = int(bad[0])
        raise NonfiniteError(
            f"{name}[{i}]={values[i].item()}: {len(bad)} counting tokens are not finite. Take them "
            "out of the mask, or look for what broke the engine that computed them."
        )


class DiscrepancyPenalty:
    """The penalty and its multiplier lambda. Call `apply` on every batch of a training step, then
    `step` once."""

    def __init__(self, config: DiscrepancyConfig):
        """Raise ValueError for a configuration without a penalty."""
        if not config.mode:
            raise ValueError("mode='': is no penalty. Use fixed or lagrangian.")
        self.config = config
        self.lam = config.lambda_
        self._seen: list[Tensor] = []

    @torch.no_grad()
    def apply(
        self, batch: TokenBatch, advantages: Tensor, gather: Gather = alone
    ) -> tuple[Tensor, dict[str, float]]:
        """Return A - lambda * delta where tokens count, A elsewhere, and the `dc/*` metrics of the
        batch.

        advantages: [N], after group normalisation, float32 or float64. The mask must be the one before
        any rejection, since rejected tokens measure the mismatch too. With a gather it is collective: a
        rank without tokens calls it with an empty batch. A centred penalty subtracts its mean over this
        batch on all ranks.
        """
        _check_advantages(batch, advantages)
        delta = discrepancy(batch, self.config.measure)
        penalty = self.lam * delta.double()
        paid = penalty - self._mean(batch, penalty, gather) if self.config.centered else penalty
        shaped = torch.where(batch.mask, advantages.double() - paid, advantages.double())
        shaped = shaped.to(advantages.dtype)
        flipped = shaped.sign() != advantages.sign()
        rows = self._per_sequence(batch, delta, penalty, flipped)
        rows = gather(rows.flatten()).reshape(-1, rows.shape[1])
        self._seen.append(rows)
        return shaped, self._metrics(rows)

    def step(self) -> dict[str, float]:
        """End a training step: move lambda (eq. 11), and return the step's `dc/*` metrics.

        Metrics and new lambda have the same bits for any order of the step's sequences, any split into
        batches and any number of ranks. dc/lambda is the one that was applied. A step without a
        counting token leaves lambda unchanged.
        """
        if not self._seen:
            raise ValueError("step=without apply: nothing was seen. Call apply before step.")
        rows = torch.cat(self._seen)
        metrics = self._metrics(rows)
        self._seen.clear()
        if self.config.mode == "lagrangian":
            lam = self.lam + self.config.eta * metrics["dc/violation"]
            self.lam = min(max(lam, self.config.lambda_min), self.config.lambda_max)
        return metrics

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint, JSON-compatible. Raises ValueError within a step."""
        if self._seen:
            raise ValueError("state_dict=within a step: its mean would be lost. Call step first.")
        return {"lambda": self.lam}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. Only `lagrangian` has a state: other modes keep theirs."""
        lam, low, high = state["lambda"], self.config.lambda_min, self.config.lambda_max
        if self.config.mode != "lagrangian":
            return
        if not low <= lam <= high:
            raise ValueError(
                f"lambda={lam}: the checkpoint's must lie in [lambda_min, lambda_max] = "
                f"[{low}, {high}]. Resume with the bounds that it was saved with."
            )
        self.lam = float(lam)

    def _per_sequence(
        self, batch: TokenBatch, delta: Tensor, penalty: Tensor, flipped: Tensor
    ) -> Tensor:
        """Return float64 [S, 6]: delta, its weight in the mean, penalty, flipped and counting tokens,
        max."""
        counts = batch.counts
        by_token = self.config.average == "token"
        total, weight = (batch.sums, counts) if by_token else (batch.means, (counts > 0).double())
        columns = [total(delta), weight, total(penalty), batch.sums(flipped), counts]
        return torch.stack([*columns, batch.maxima(delta)], dim=1)

    def _mean(self, batch: TokenBatch, values: Tensor, gather: Gather) -> float:
        """Average over the counting tokens of all ranks, or over the means of their sequences."""
        if self.config.average == "token":
            return global_token_mean(batch, values, gather)
        return global_sequence_mean(batch, batch.means(values), gather)

    def _metrics(self, rows: Tensor) -> dict[str, float]:
        """Return exact means over [S, 6]; all 0 but lambda if no token counts."""
        delta, weight, penalty, flipped, counts = (exact_sum(c) for c in rows[:, :5].T)
        some = weight > 0
        mean = delta / weight if some else 0.0
        return {
            "dc/lambda": self.lam,
            "dc/delta_mean": mean,
            "dc/delta_max": float(rows[:, 5].max()) if some else 0.0,
            "dc/violation": mean - self.config.budget if some else 0.0,
            "dc/penalty_mean": penalty / weight if some else 0.0,
            "dc/sign_flip_fraction": flipped / counts if some else 0.0,
        }


def _check_advantages(batch: TokenBatch, advantages: Tensor) -> None:
    if advantages.shape != batch.mask.shape:
        raise ValueError(
            f"advantages={tuple(advantages.shape)}: must be one per token, "
            f"{tuple(batch.mask.shape)}. Spread them with TokenBatch.spread."
        )
    # bfloat16 rounds a penalty of 0.1 * 0.0037 away from an advantage of 1.
    if advantages.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"advantages={advantages.dtype}: must be float32. Call .float() on them.")
    _check_finite("advantages", advantages, batch.mask)
