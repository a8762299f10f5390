"""The seam to `fallback_correction`: what the samples of an unaligned rollout need before their loss.

Runs on all micro-batches of a rollout at once, since weights are normalised and metrics averaged
over the global batch; the results are written into the micro-batches. In bypass (--use-rollout-logprobs)
nobody has computed the trainer's log-probabilities yet: the loss takes weights and rejection from
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fallback_correction.config import CorrectionConfig
from fallback_correction.correction import correct
from fallback_correction.discrepancy import DiscrepancyPenalty
from fallback_correction.estimators import estimator_report
from fallback_correction.mismatch_metrics import mismatch_metrics
from fallback_correction.ratios import without_nonfinite
from fallback_correction.tokens import TokenBatch
from onpolicy.algorithm.aggregation import token_shares
from onpolicy.config import TrainConfig
from onpolicy.config.groups import FallbackConfig
from onpolicy.train import distributed
from onpolicy.train.batch import MicroBatch
from onpolicy.train.correction_flags import custom_correction, make_penalty, weight_correction

Metrics = dict[str, float]


class Corrections:
    """The corrections that a run's flags ask for, and the multiplier that one of them carries on."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self._penalty = make_penalty(config.fallback)
        self.use(config.fallback)

    def use(self, flags: FallbackConfig) -> None:
        """Take corrections from other flags from now on."""
        self.flags, self.weights = flags, weight_correction(flags)
        self.penalty = self._penalty if flags.dc.mode else None
        self.custom = custom_correction(self.config, flags)
        self.bypass = flags.use_rollout_logprobs

    @property
    def wants_metrics(self) -> bool:
        """Whether the distance between the engines is measured."""
        corrects = self.weights or self.penalty or self.custom
        return self.flags.get_mismatch_metrics or bool(corrects)

    def state_dict(self) -> dict[str, Any]:
        """What the next rollout depends on."""
        return {} if self._penalty is None else {"penalty": self._penalty.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._penalty is not None and "penalty" in state:
            self._penalty.load_state_dict(state["penalty"])

    def prepare(self, steps: Sequence[list[MicroBatch]], *, active: bool) -> Metrics:
        """Fill in shares, weights and advantages of a rollout's micro-batches; collective.

        active: whether to correct; an aligned rollout needs shares alone. Raises NonfiniteError.
        """
        rollout = [batch for step in steps for batch in step]
        metrics: Metrics = {}
        if active:
            self._reject_nonfinite(rollout)
            for batch in rollout:
                batch.custom = self.custom
                batch.correction = self.weights if self.bypass else None
            if self.penalty is not None:
                metrics = self._penalise(rollout, self.penalty)
        each = [self._prepare_step(step, active and not self.bypass) for step in steps]
        return metrics | _means(each)

    def measure(self, steps: Sequence[Sequence[MicroBatch]]) -> Metrics:
        """How far the engines were apart on a rollout's first optimizer step; collective.

        By the log-probabilities of the loss's own forward pass, which are there in any mode; in
        bypass also what the loss of every step did with them.
        """
        if not self.wants_metrics:
            return {}
        tokens = _own_tokens(steps[0])
        advantages = torch.cat([batch.advantages for batch in steps[0]])
        upper = self.flags.tis_upper_bound
        metrics = {
            **mismatch_metrics(tokens, gather_vectors),
            **estimator_report(tokens, advantages, upper, gather_vectors),
        }
        if self.bypass and (config := self.weights):
            metrics |= _means(
                [correct(_own_tokens(s), config, gather_vectors).metrics for s in steps]
            )
        return metrics

    def k3(self, step: Sequence[MicroBatch], log_probs: Sequence[Tensor]) -> float:
        """`mismatch/k3` of other log-probabilities of the trainer's; collective."""
        return mismatch_metrics(_tokens(step, log_probs), gather_vectors)["mismatch/k3"]

    def _reject_nonfinite(self, rollout: list[MicroBatch]) -> None:
        """Let nothing else look at tokens that --tis-nonfinite rejects."""
        if self.flags.tis_nonfinite == "reject":
            config = self.weights or CorrectionConfig(nonfinite="reject")
            finite = without_nonfinite(_old_tokens(rollout), config)
            for batch, part in _split(rollout, finite.mask):
                batch.mask = part

    def _penalise(self, rollout: list[MicroBatch], penalty: DiscrepancyPenalty) -> Metrics:
        advantages = torch.cat([batch.advantages for batch in rollout])
        finite = replace(_old_tokens(rollout), mask=torch.cat([batch.mask for batch in rollout]))
        penalised, _ = penalty.apply(finite, advantages, gather_vectors)
        for batch, part in _split(rollout, penalised):
            batch.advantages = part
        return penalty.step()

    def _prepare_step(self, step: list[MicroBatch], active: bool) -> Metrics:
        tokens, metrics = _old_tokens(step), dict[str, float]()
        if active and self.weights is not None:
            correction = correct(tokens, self.weights, gather_vectors)
            tokens, metrics = replace(tokens, mask=correction.counted), correction.metrics
            for batch, part in _split(step, correction.mask):
                batch.kept = part
            if correction.weights is not None:
                for batch, part in _split(step, correction.weights):
                    batch.importance_weights = part
        shares = token_shares(
            tokens,
            self.config.loss_aggregation,
            gather_vectors,
            scale_length=self.config.rollout.rollout_max_response_len,
        )
        for batch, part in _split(step, shares):
            batch.shares = torch.where(batch.mask, part, 0)
        return metrics


def gather_vectors(values: Tensor) -> Tensor:
    """The vectors of all ranks, one after the other."""
    if distributed.data_size() == 1:
        return values
    return torch.cat(distributed.gather_data(values.cpu()))


def _old_tokens(batches: Sequence[MicroBatch]) -> TokenBatch:
    """Both engines' log-probabilities before the first optimizer step, of every sampled token."""
    return _tokens(batches, [batch.old_log_probs for batch in batches])


def _own_tokens(batches: Sequence[MicroBatch]) -> TokenBatch:
    """The same with those of the loss's own forward pass."""
    return _tokens(batches, [batch.train_log_probs for batch in batches])


def _tokens(batches: Sequence[MicroBatch], log_probs: Sequence[Tensor | None]) -> TokenBatch:
    return TokenBatch.packed(
        torch.cat([x for x in log_probs if x is not None]),
        torch.cat([batch.rollout_log_probs for batch in batches]),
        [n for batch in batches for n in batch.response_lens],
        torch.cat([batch.sampled for batch in batches]),
    )


def _split(batches: Sequence[MicroBatch], values: Tensor) -> list[tuple[MicroBatch, Tensor]]:
    parts = values.split([len(batch.mask) for batch in batches])
    return list(zip(batches, parts, strict=True))


def _means(each: Sequence[Metrics]) -> Metrics:
    return {name: fmean(step[name] for step in each) for name in each[0]}
