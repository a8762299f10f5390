"""What the policy learns from one rollout: parity check, corrections, loss and optimizer steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ParityError
from onpolicy.ops.log_probs import Scores
from onpolicy.train import distributed
from onpolicy.train.advantages import Estimator, ScoresByRole, token_advantages
from onpolicy.train.batch import (
    PackedBatch,
    ScoredBatch,
    WeighedBatch,
    packed_batch,
)
from onpolicy.train.correction import Corrections
from onpolicy.train.engine import Role, ShardedModel
from onpolicy.train.learnt import learnt_tokens
from onpolicy.train.loss import LossSettings, policy_loss
from onpolicy.train.optimizer_step import optimizer_step
from onpolicy.train.parity_gate import ParityGate
from onpolicy.train.shares import Outcomes, Share
from onpolicy.types import LearntTokens, TrainOutcome

logger = logging.getLogger(__name__)

Models = dict[Role, ShardedModel]


class Learner:
    """Policy-gradient steps on one rank's share of a rollout; every method is collective."""

    def __init__(
        self, config: TrainConfig, models: Models, estimator: Estimator, device: torch.device
    ):
        self.config, self.models, self.device = config, models, device
        self.estimator = estimator
        self.loss_settings = LossSettings.of(config)
        self.corrections = Corrections(config)

    def learn(
        self, share: Share, rates: Sequence[float], step: int, contract: NumericsContract
    ) -> TrainOutcome:
        """Take one optimizer step at each of these rates, on what was sampled under this contract.

        What the parity check found is also in a ParityError.
        """
        steps = [
            [packed_batch(samples, self.device) for samples in share.micro_batches(number)]
            for number in range(len(rates))
        ]
        gate = self._gate(step, contract)
        corrected = not contract.is_aligned or any(share.lags)
        scored, perf = self._scored(steps, share.outcomes, corrected=corrected)
        try:
            metrics, learnt = self._train_on(
                scored, rates, gate, corrected=corrected, lags=share.lags
            )
            apart = None
        except ParityError as error:
            apart = gate.first_apart()
            error.findings = gate.findings(share.outcomes.num_samples, apart)
            if gate.on_mismatch != "fall back":
                raise
            logger.error("%s Going on with the fallback correction.", error)
            gate = ParityGate(step, "measure")
            scored, perf = self._scored(steps, share.outcomes, corrected=True)
            metrics, learnt = self._train_on(scored, rates, gate, corrected=True)
            metrics["parity/num_fallbacks"] = 1.0
        findings = gate.findings(share.outcomes.num_samples, apart)
        return TrainOutcome(metrics=metrics | perf, findings=findings, learnt=learnt)

    def _train_on(
        self,
        steps: list[list[ScoredBatch]],
        rates: Sequence[float],
        gate: ParityGate,
        *,
        corrected: bool,
        lags: Sequence[int] = (),
    ) -> tuple[dict[str, float], dict[int, LearntTokens]]:
        """The optimizer steps of a rollout; `corrected`: as one that is not on-policy.

        Returns metrics, and what is told of the samples that are shown.
        """
        metrics = self._own_routing(steps[0])
        weighed, found = self.corrections.weigh(steps, active=corrected)
        updates = [
            self._optimizer_step(micro_batches, rate, gate if number == 0 else None)
            for number, (micro_batches, rate) in enumerate(zip(weighed, rates, strict=True))
        ]
        metrics |= found | {
            name: fmean(update[name] for update, _ in updates) for name in updates[0][0]
        }
        trained = list(zip(weighed, [log_probs for _, log_probs in updates], strict=True))
        if corrected:
            metrics |= self.corrections.measure(trained) | self.corrections.measure_lags(
                trained, lags
            )
        return {**metrics, **gate.reduce().metrics()}, learnt_tokens(trained)

    def _optimizer_step(
        self, micro_batches: Sequence[WeighedBatch], rate: float, gate: ParityGate | None
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Its metrics, and the log-probabilities of each micro-batch that its loss was of."""
        check = None if gate is None else gate.check
        metrics, train_log_probs = optimizer_step(
            self.models["policy"], micro_batches, self._loss, check, rate
        )
        if replayed := metrics.pop("routing/num_replayed", 0.0):
            metrics["routing/differing_share"] = metrics.pop("routing/num_differing") / replayed
        return metrics, train_log_probs

    def _loss(self, scores: Scores, batch: WeighedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's part of the loss and of the metrics of the global batch."""
        loss, metrics = policy_loss(scores.log_probs, batch, self.loss_settings)
        return loss, metrics | {"train/entropy": (scores.entropy * batch.shares).sum()}

    def _own_routing(self, step: Sequence[PackedBatch]) -> dict[str, float]:
        """How far the engines would be apart without the rollout's experts, if it is measured."""
        replays = distributed.any_data(any(b.packed.routed_experts is not None for b in step))
        if not replays or not self.corrections.flags.is_measured:
            return {}
        scores = self.models["policy"].score([b.packed.with_own_routing() for b in step])
        log_probs = [each.log_probs for each in scores]
        return {"routing/k3_without_replay": self.corrections.k3(step, log_probs)}

    def _gate(self, step: int, contract: NumericsContract) -> ParityGate:
        output = self.config.output
        load = f" --load {output.save}" if output.save else ""
        remedy = (
            "To find out which operator differs, and in which layer, run: onpolicy explain --case "
            f"{output.case_file(step)} --hf-checkpoint {self.config.model.hf_checkpoint}{load}"
        )
        policy = self.config.plan.on_mismatch(is_aligned=contract.is_aligned)
        return ParityGate(step, policy, remedy)

    def _scored(
        self, steps: list[list[PackedBatch]], outcomes: Outcomes, *, corrected: bool
    ) -> tuple[list[list[ScoredBatch]], dict[str, float]]:
        """Scores and advantages, before the first optimizer step changes anything."""
        start = time.perf_counter()
        batches = [batch for step in steps for batch in step]
        roles = self._roles(len(steps), corrected=corrected)
        scores = {role: self._score(role, batches) for role in roles}
        parts = zip(
            batches,
            token_advantages(self.estimator, outcomes, batches, scores),
            self._old_log_probs(batches, scores, corrected=corrected),
            self._reference_log_probs(batches, scores),
            strict=True,
        )
        scored = iter(
            [
                ScoredBatch.after(batch, advantages=a, old_log_probs=old, ref_log_probs=ref)
                for batch, a, old, ref in parts
            ]
        )
        seconds = time.perf_counter() - start
        metrics = {"perf/log_probs_time": seconds, **self.estimator.metrics()}
        return [[next(scored) for _ in step] for step in steps], metrics

    def _roles(self, num_steps: int, *, corrected: bool) -> list[Role]:
        """The models that score a rollout before its first optimizer step, in their order."""
        asked = set(self.estimator.roles)
        if self.config.algorithm.use_kl_loss:
            asked.add("reference")
        if corrected and not self.corrections.bypass and self.corrections.needs_scores(num_steps):
            asked.add("policy")
        return [role for role in self.models if role in asked]

    def _score(self, role: Role, batches: Sequence[PackedBatch]) -> list[Scores]:
        """Scores by the model of a role; the policy alone takes the experts that the rollout took."""
        is_policy = role == "policy"
        packed = [b.packed if is_policy else b.packed.with_own_routing() for b in batches]
        return self.models[role].score(packed)

    def _old_log_probs(
        self, batches: Sequence[PackedBatch], scores: ScoresByRole, *, corrected: bool
    ) -> Sequence[Tensor | None]:
        """The rollout's in bypass, and on policy under an aligned contract, where computing them again
        would give the same bits; None where the loss's own are they."""
        if not corrected or self.corrections.bypass:
            return [batch.rollout_log_probs for batch in batches]
        if "policy" not in scores:
            return [None] * len(batches)
        return [each.log_probs for each in scores["policy"]]

    def _reference_log_probs(
        self, batches: Sequence[PackedBatch], scores: ScoresByRole
    ) -> Sequence[Tensor | None]:
        if not self.config.algorithm.use_kl_loss:
            return [None] * len(batches)
        return [each.log_probs for each in scores["reference"]]
