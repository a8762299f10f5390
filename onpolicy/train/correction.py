"""The seam to `fallback_correction`: what the samples of an unaligned rollout need before their loss.

Runs on all micro-batches of a rollout at once, since weights are normalised and metrics averaged
over the global batch; the results are written into the micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fallback_correction.adapters.miles import correction_config
from fallback_correction.aggregation import token_shares
from fallback_correction.config import CorrectionConfig
from fallback_correction.correction import correct
from fallback_correction.discrepancy import DiscrepancyConfig, DiscrepancyPenalty
from fallback_correction.estimators import estimator_report
from fallback_correction.mismatch_metrics import mismatch_metrics
from fallback_correction.objectives import ObjectiveConfig
from fallback_correction.tokens import TokenBatch
from onpolicy.config import TrainConfig
from onpolicy.config.groups import FallbackConfig
from onpolicy.plugins import load_function
from onpolicy.train import distributed
from onpolicy.train.batch import MicroBatch
from onpolicy.train.loss import CustomCorrection, LossSettings, miles_correction

Metrics = dict[str, float]


class Corrections:
    """The corrections that a run's flags ask for, and the multiplier that one of them carries on."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self.penalty = make_penalty(config.fallback)
        self.use(config.fallback)

    def use(self, flags: FallbackConfig) -> None:
        """Take weights and rejection from other flags from now on."""
        self.flags, self.weights = flags, weight_correction(flags)

    @property
    def wants_metrics(self) -> bool:
        """Whether the distance between the engines is measured."""
        flags = self.flags
        return flags.get_mismatch_metrics or flags.use_tis or flags.use_rs or bool(flags.dc_mode)

    def state_dict(self) -> dict[str, Any]:
        """What the next rollout depends on."""
        return {} if self.penalty is None else {"penalty": self.penalty.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.penalty is not None and "penalty" in state:
            self.penalty.load_state_dict(state["penalty"])

    def prepare(self, steps: Sequence[list[MicroBatch]], *, active: bool) -> Metrics:
        """Fill in shares, weights and advantages of a rollout's micro-batches; collective.

        active: whether to correct; an aligned rollout needs shares alone.
        """
        metrics: Metrics = {}
        if active and self.penalty is not None:
            metrics = self._penalise([batch for step in steps for batch in step], self.penalty)
        each = [self._prepare_step(step, active) for step in steps]
        return metrics | {name: fmean(step[name] for step in each) for name in each[0]}

    def measure(self, step: Sequence[MicroBatch]) -> Metrics:
        """How far the engines were apart on a rollout's first optimizer step; collective.

        By the log-probabilities of the loss's own forward pass, which are there in any mode.
        """
        if not self.wants_metrics:
            return {}
        tokens = _tokens(step, [batch.train_log_probs for batch in step])
        advantages = torch.cat([batch.advantages for batch in step])
        upper = self.flags.tis_upper_bound
        return {
            **mismatch_metrics(tokens, gather_vectors),
            **estimator_report(tokens, advantages, upper, gather_vectors),
        }

    def k3(self, step: Sequence[MicroBatch], log_probs: Sequence[Tensor]) -> float:
        """`mismatch/k3` of other log-probabilities of the trainer's; collective."""
        return mismatch_metrics(_tokens(step, log_probs), gather_vectors)["mismatch/k3"]

    def _penalise(self, rollout: list[MicroBatch], penalty: DiscrepancyPenalty) -> Metrics:
        advantages = torch.cat([batch.advantages for batch in rollout])
        penalised, _ = penalty.apply(_old_tokens(rollout), advantages, gather_vectors)
        for batch, part in _split(rollout, penalised):
            batch.advantages = part
        return penalty.step()

    def _prepare_step(self, step: list[MicroBatch], active: bool) -> Metrics:
        tokens, metrics = _old_tokens(step), dict[str, float]()
        if active and self.weights is not None:
            correction = correct(tokens, self.weights, gather_vectors)
            metrics = correction.metrics
            kept = correction.mask.float()
            weights = kept if correction.weights is None else correction.weights
            for batch, part in _split(step, weights):
                batch.importance_weights = part
                # Rejected as not finite: nothing else may look at such a token either.
                batch.mask = batch.mask & torch.isfinite(_old(batch) - batch.rollout_log_probs)
            if not self.weights.rejected_in_denominator:
                tokens = replace(tokens, mask=correction.mask)
        shares = token_shares(
            tokens,
            self.config.algorithm.loss_aggregation,
            gather_vectors,
            scale_length=self.config.rollout.rollout_max_response_len,
        )
        for batch, part in _split(step, shares):
            batch.shares = part
        return metrics


def weight_correction(flags: FallbackConfig) -> CorrectionConfig | None:
    """Importance weights and rejection as the flags have them; None if a function of the user's own
    takes their place or nothing is asked for."""
    asked = flags.use_tis or flags.use_rs or flags.rs_veto_threshold is not None
    if not asked or flags.custom_tis_function_path:
        return None
    return replace(
        correction_config(flags),
        rejected_in_denominator=flags.rejected_in_denominator,
        log_ratio_clamp=flags.tis_log_ratio_clamp,
        nonfinite=flags.tis_nonfinite,
    )


def make_penalty(flags: FallbackConfig) -> DiscrepancyPenalty | None:
    """The discrepancy-constrained advantage, if it is asked for."""
    if not flags.dc_mode:
        return None
    return DiscrepancyPenalty(
        DiscrepancyConfig(
            mode=flags.dc_mode,
            measure=flags.dc_measure,
            lambda0=flags.dc_lambda,
            eta=flags.dc_eta,
            budget=flags.dc_budget,
            lambda_min=flags.dc_lambda_min,
            lambda_max=flags.dc_lambda_max,
            margin=flags.dc_margin,
            average=flags.dc_average,
        )
    )


def loss_settings(config: TrainConfig) -> LossSettings:
    """The loss that the flags ask for."""
    algorithm = config.algorithm
    return LossSettings(
        objective=ObjectiveConfig(
            kind=algorithm.policy_loss,
            eps_clip=algorithm.eps_clip,
            eps_clip_high=config.eps_clip_high,
            eps_clip_c=algorithm.eps_clip_c,
        ),
        kl_loss_coef=algorithm.kl_loss_coef,
        kl_loss_type=algorithm.kl_loss_type,
        use_unbiased_kl=algorithm.use_unbiased_kl,
        opsm_delta=algorithm.opsm_delta if algorithm.use_opsm else None,
        custom=custom_correction(config.fallback),
    )


def custom_correction(flags: FallbackConfig) -> CustomCorrection | None:
    """The user's own, if there is one. Raises ConfigError if it cannot be imported."""
    path = flags.custom_tis_function_path
    if not path:
        return None
    return miles_correction(load_function(path, "--custom-tis-function-path"), flags)


def gather_vectors(values: Tensor) -> Tensor:
    """The vectors of all ranks, one after the other."""
    if distributed.data_size() == 1:
        return values
    return torch.cat(distributed.gather_data(values.cpu()))


def _old_tokens(batches: Sequence[MicroBatch]) -> TokenBatch:
    """Both engines' log-probabilities before the first optimizer step."""
    return _tokens(batches, [batch.old_log_probs for batch in batches])


def _tokens(batches: Sequence[MicroBatch], log_probs: Sequence[Tensor | None]) -> TokenBatch:
    return TokenBatch.packed(
        torch.cat([x for x in log_probs if x is not None]),
        torch.cat([batch.rollout_log_probs for batch in batches]),
        [n for batch in batches for n in batch.response_lens],
        torch.cat([batch.mask for batch in batches]),
    )


def _old(batch: MicroBatch) -> Tensor:
    assert batch.old_log_probs is not None
    return batch.old_log_probs


def _split(batches: Sequence[MicroBatch], values: Tensor) -> list[tuple[MicroBatch, Tensor]]:
    parts = values.split([len(batch.mask) for batch in batches])
    return list(zip(batches, parts, strict=True))
