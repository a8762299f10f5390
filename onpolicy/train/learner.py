"""Learning on one rollout: parity check, corrections, loss and optimizer steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ParityError
from onpolicy.models.grammars import Grammars
from onpolicy.ops.cuts import Cut
from onpolicy.ops.log_probs import Scores
from onpolicy.train import distributed
from onpolicy.train.advantages import Estimator, ScoresByRole, token_advantages, token_returns
from onpolicy.train.batch import PackedBatch, ScoredBatch, WeighedBatch, packed_batch, sharing
from onpolicy.train.correction import Corrections
from onpolicy.train.critic import Critic, known_variance
from onpolicy.train.engine import Role, ShardedModel
from onpolicy.train.entropy import EntropyBonus
from onpolicy.train.learnt import learnt_tokens
from onpolicy.train.loss import LossSettings, policy_loss
from onpolicy.train.marks import early_entropies, entropies_from, marked, marked_by_own_entropy
from onpolicy.train.optimizer_step import optimizer_step
from onpolicy.train.parity_gate import ParityGate
from onpolicy.train.penalties import Penalties
from onpolicy.train.redraw import with_draws
from onpolicy.train.shares import Outcomes, Share
from onpolicy.train.teachers import Teachers
from onpolicy.types import LearntTokens, TrainOutcome

logger = logging.getLogger(__name__)

Models = dict[Role, ShardedModel]


class Learner:
    """Policy-gradient steps on one rank's share of a rollout; every method is collective."""

    def __init__(
        self,
        config: TrainConfig,
        models: Models,
        estimator: Estimator,
        grammars: Grammars,
        device: torch.device,
    ):
        self.config, self.models, self.device = config, models, device
        self.estimator, self.grammars = estimator, grammars
        self.loss_settings = LossSettings.of(config)
        self.corrections = Corrections(config)
        rollout = config.rollout
        self.cut = Cut.of(rollout.rollout_top_k, rollout.rollout_top_p, rollout.rollout_min_p)
        self.penalties = Penalties(config)
        self.teachers = Teachers.of(config, models)
        self.bonus = EntropyBonus(config.algorithm)
        self.critic = Critic(config, models["critic"]) if "critic" in models else None
        self._marked_late: WeighedBatch | None = None
        """Micro-batch of the loss, if it was marked by the loss's own entropies."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next rollout depends on, by component."""
        carried = {"penalties": self.penalties.state_dict(), "bonus": self.bonus.state_dict()}
        moved = {name: state for name, state in carried.items() if state}
        return {"corrections": self.corrections.state_dict(), **moved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.corrections.load_state_dict(state["corrections"])
        self.penalties.load_state_dict(state.get("penalties", {}))
        self.bonus.load_state_dict(state.get("bonus", {}))

    def learn(
        self, share: Share, rates: Sequence[float], step: int, contract: NumericsContract
    ) -> TrainOutcome:
        """Take one optimizer step at each of these rates, on samples drawn under this contract.

        A ParityError carries the findings of the parity check too.
        """
        self.loss_settings = replace(self.loss_settings, entropy_coef=self.bonus.coef)
        steps = [
            [packed_batch(x, self.device, share.shares_prefixes) for x in share.micro_batches(n)]
            for n in range(len(rates))
        ]
        gate = ParityGate.of(self.config, step, contract, share.sampled)
        corrected = not contract.is_aligned or any(share.lags)
        told = contract.is_aligned
        scored, perf = self._scored(steps, share.outcomes, corrected=corrected, told=told)
        try:
            metrics, learnt = self._train_on(
                scored, rates, gate, corrected=corrected, lags=share.lags
            )
            apart = None
        except ParityError as error:
            apart = gate.first_apart()
            error.findings = gate.findings(share.outcomes.num_samples, apart)
            if gate.on_mismatch != "fall back" or not error.is_correctable:
                raise
            logger.error("%s Going on with the fallback correction.", error)
            # No step was taken yet: score again, and train on the same rollout with corrections.
            gate = ParityGate(step, "measure")
            scored, perf = self._scored(steps, share.outcomes, corrected=True, told=False)
            metrics, learnt = self._train_on(scored, rates, gate, corrected=True)
            metrics["parity/num_fallbacks"] = 1.0
        self.penalties.step()
        metrics |= self.bonus.step(metrics["train/entropy"])
        metrics |= perf | sharing(steps, share.shares_prefixes)
        findings = gate.findings(share.outcomes.num_samples, apart)
        return TrainOutcome(metrics=metrics, findings=findings, learnt=learnt)

    def _train_on(
        self,
        steps: list[list[ScoredBatch]],
        rates: Sequence[float],
        gate: ParityGate,
        *,
        corrected: bool,
        lags: Sequence[int] = (),
    ) -> tuple[dict[str, float], dict[int, LearntTokens]]:
        """Take the optimizer steps of a rollout; `corrected`: apply the off-policy corrections.

        Returns metrics, and the learnt tokens of samples that are shown.
        """
        self._marked_late = None
        metrics = self._own_routing(steps[0])
        weighed, found = self.corrections.weigh(steps, active=corrected)
        weighed = [marked(step, self.config, gate.step) for step in weighed]
        updates = [
            self._optimizer_steps(micro_batches, rate, gate, number)
            for number, (micro_batches, rate) in enumerate(zip(weighed, rates, strict=True))
        ]
        metrics |= found | {
            name: fmean(update[name] for update, _ in updates) for name in updates[0][0]
        }
        if self._marked_late is not None:
            weighed = [[self._marked_late]]
        trained = list(zip(weighed, [log_probs for _, log_probs in updates], strict=True))
        if corrected:
            metrics |= self.corrections.measure(trained) | self.corrections.measure_lags(
                trained, lags
            )
        return {**metrics, **gate.metrics()}, learnt_tokens(trained)

    def _optimizer_steps(
        self, micro_batches: Sequence[WeighedBatch], rate: float, gate: ParityGate, number: int
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Take the policy's and the critic's step of this number in a rollout; return their metrics,
        and the log-probabilities of each micro-batch that the policy's loss used."""
        first = gate if number == 0 else None
        if first is not None and first.stops:
            own, always = (self.cut, self.grammars), first.expected is not None
            micro_batches = [batch.with_own_cut(*own, always=always) for batch in micro_batches]
        if first is not None and first.expected is not None:
            share, seed = self.config.parity.redraw_share, self.config.seed
            micro_batches = [with_draws(batch, share, seed) for batch in micro_batches]
        if self.critic is None:
            return self._optimizer_step(micro_batches, rate, first)
        if self.critic.learns_alone(gate.step):
            metrics, log_probs = self._no_step(micro_batches, first)
        else:
            metrics, log_probs = self._optimizer_step(micro_batches, rate, first)
        of_critic = self.critic.take_step(micro_batches, self.critic.rate(gate.step, number))
        return metrics | of_critic, log_probs

    def _no_step(
        self, micro_batches: Sequence[WeighedBatch], gate: ParityGate | None
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Compare the policy with the rollout without training it; return as `_optimizer_step` does."""
        found, log_probs = [], []
        scored = self.models["policy"].score([batch.packed for batch in micro_batches])
        for scores, batch in zip(scored, micro_batches, strict=True):
            if gate is not None:
                gate.check(scores.log_probs, batch, scores.entropy, scores.drawn)
            _, metrics = self._loss(scores, batch)
            found.append({name: float(value) for name, value in metrics.items()})
            log_probs.append(scores.log_probs)
        if gate is not None:
            gate.require_all()
        return {**distributed.sum_micro_batches(found), "train/lr": 0.0}, log_probs

    def _optimizer_step(
        self, micro_batches: Sequence[WeighedBatch], rate: float, gate: ParityGate | None
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Take the policy's step; return its metrics and each micro-batch's log-probabilities."""
        metrics, train_log_probs = optimizer_step(
            self.models["policy"], micro_batches, self._loss, gate, rate
        )
        if replayed := metrics.pop("routing/num_replayed", 0.0):
            metrics["routing/differing_share"] = metrics.pop("routing/num_differing") / replayed
        return metrics, train_log_probs

    def _loss(self, scores: Scores, batch: WeighedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a micro-batch's part of the loss and of the metrics of the global batch."""
        if self.config.algorithm.compares_entropies and batch.entropy is None:
            batch = marked_by_own_entropy(batch, scores.entropy, self.config)
            self._marked_late = batch
        reverse_kl = getattr(scores, "reverse_kl", None)
        return policy_loss(scores.log_probs, batch, self.loss_settings, scores.entropy, reverse_kl)

    def _own_routing(self, step: Sequence[PackedBatch]) -> dict[str, float]:
        """Return the engines' mismatch without routing replay, if it is measured."""
        replays = distributed.any_data(any(b.packed.routed_experts is not None for b in step))
        if not replays or not self.corrections.flags.is_measured:
            return {}
        scores = self.models["policy"].score([b.packed.with_own_routing() for b in step])
        log_probs = [each.log_probs for each in scores]
        return {"routing/k3_without_replay": self.corrections.k3(step, log_probs)}

    def _scored(
        self, steps: list[list[PackedBatch]], outcomes: Outcomes, *, corrected: bool, told: bool
    ) -> tuple[list[list[ScoredBatch]], dict[str, float]]:
        """Compute scores and advantages before the first step; told: use the entropies that the engine
        reported."""
        start = time.perf_counter()
        batches = [batch for step in steps for batch in step]
        source = entropies_from(steps, self.config, told=told)
        roles = self._roles(steps, source, corrected=corrected)
        scores: dict[Role, Any] = {role: self._score(role, batches) for role in roles}
        if self.teachers is not None:
            scores["teacher"], batches = self.teachers.score(batches)
        old = self._old_log_probs(batches, scores, corrected=corrected)
        reference = _told(scores.get("reference"), "log_probs", len(batches))
        paid, metrics = self.penalties.of(batches, old, reference)
        parts = zip(
            batches,
            token_advantages(self.estimator, outcomes, batches, scores, paid),
            old,
            reference if self.config.algorithm.use_kl_loss else [None] * len(batches),
            early_entropies(source, batches, scores.get("policy")),
            self._values_and_returns(batches, scores, paid),
            strict=True,
        )
        scored = [
            ScoredBatch.after(
                batch, advantages=a, old_log_probs=old, ref_log_probs=ref, entropy=h, **critics
            )
            for batch, a, old, ref, h, critics in parts
        ]
        metrics |= self.estimator.metrics()
        if self.critic is not None:
            metrics |= known_variance(scored)
        metrics["perf/log_probs_time"] = time.perf_counter() - start
        rest = iter(scored)
        return [[next(rest) for _ in step] for step in steps], metrics

    def _roles(
        self, steps: list[list[PackedBatch]], entropies: str, *, corrected: bool
    ) -> list[Role]:
        """Return the roles that score a rollout before its first optimizer step, in order."""
        asked, penalised = set(self.estimator.roles), self.penalties.reads_reference
        if self.config.algorithm.use_kl_loss or penalised:
            asked.add("reference")
        algorithm = self.config.algorithm
        early = penalised or self.corrections.needs_scores(len(steps))
        early |= algorithm.compares_covariances
        if entropies == "policy" or (corrected and not self.corrections.bypass and early):
            asked.add("policy")
        return [role for role in self.models if role in asked]

    def _score(self, role: Role, batches: Sequence[PackedBatch]) -> list[Scores]:
        """Score with the model of a role; only the policy replays the rollout's experts."""
        is_policy = role == "policy"
        packed = [b.packed if is_policy else b.packed.with_own_routing() for b in batches]
        return self.models[role].score(packed)

    def _old_log_probs(
        self, batches: Sequence[PackedBatch], scores: ScoresByRole, *, corrected: bool
    ) -> Sequence[Tensor | None]:
        """Return the rollout's log-probabilities in bypass and on-policy under an aligned contract,
        where recomputing gives the same bits; otherwise the policy's, or None where the loss computes
        them."""
        if not corrected or self.corrections.bypass:
            return [batch.rollout_log_probs for batch in batches]
        return _told(scores.get("policy"), "log_probs", len(batches))

    def _values_and_returns(
        self,
        batches: Sequence[PackedBatch],
        scores: ScoresByRole,
        penalties: Mapping[int, Sequence[float]] | None,
    ) -> list[dict[str, Tensor]]:
        """Return the critic's inputs; empty without a critic."""
        if self.critic is None:
            return [{} for _ in batches]
        returns = token_returns(self.estimator, batches, scores, penalties)
        return [
            {"old_values": said.values, "returns": each}
            for said, each in zip(scores["critic"], returns, strict=True)
        ]


def _told(scores: Sequence[Any] | None, name: str, count: int) -> list[Tensor | None]:
    """Return a field of a model's scores for each micro-batch; None for a model that was not asked."""
    return [None] * count if scores is None else [getattr(each, name) for each in scores]
