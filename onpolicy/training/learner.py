"""Learning on one rollout, in four stages.

    score         each model scores the micro-batches, if a later stage reads what it says
    advantages    adds to the micro-batches everything that stays fixed in all optimizer steps
    correct       adds each token's part in the loss
    loss          the optimizer steps; the first one follows the parity check

A feature joins a stage with an object that the learner holds: teachers score; the estimator, penalties
and the critic make advantages and targets; corrections weigh; the critic's own step belongs to the
loss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fallback_correction.score_centering import likeliest_kl
from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ParityError
from onpolicy.ops.draws import Draws
from onpolicy.ops.kept_tokens import Cut
from onpolicy.ops.log_probs import Scores
from onpolicy.training.advantages import (
    Estimator,
    Penalties,
    ScoresByRole,
    after,
    by_batch,
    scored_trajectories,
    token_advantages,
)
from onpolicy.training.batch import (
    MicroBatch,
    completed,
    packed_batch,
    sharing,
)
from onpolicy.training.critic import Critic, known_variance
from onpolicy.training.distributed import gather_by_number
from onpolicy.training.engine import Role, ShardedModel, no_step, optimizer_step
from onpolicy.training.loss import LossSettings, policy_loss
from onpolicy.training.loss_scale import LossScale
from onpolicy.training.parity_gate import ParityGate
from onpolicy.training.rollout_correction import Corrections, TrainedStep, likeliest_tokens
from onpolicy.training.shares import Outcomes, Steps
from onpolicy.training.teachers import Teachers
from onpolicy.types import LearntTokens, Sample, TrainOutcome

logger = logging.getLogger(__name__)

Models = dict[Role, ShardedModel]
Metrics = dict[str, float]


class Learner:
    """Policy-gradient steps on one rank's share of a rollout; every method is collective."""

    def __init__(
        self,
        config: TrainConfig,
        models: Models,
        estimator: Estimator,
        device: torch.device,
    ):
        self.config, self.models, self.device = config, models, device
        self.estimator = estimator
        self.settings = LossSettings.of(config)
        self.corrections = Corrections(config)
        rollout = config.rollout
        self.cut = Cut.of(rollout.rollout_top_k, rollout.rollout_top_p, rollout.rollout_min_p)
        self.penalties = Penalties(config)
        self.teachers = Teachers.of(config, models)
        self.critic = Critic(config, models["critic"]) if "critic" in models else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next rollout depends on, by component."""
        scales = {role: scale.state_dict() for role, scale in self._loss_scales().items()}
        own = {"loss_scale": scales} if scales else {}
        return {"corrections": self.corrections.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.corrections.load_state_dict(state["corrections"])
        for role, saved in state.get("loss_scale", {}).items():
            if scale := self._loss_scales().get(role):
                scale.load_state_dict(saved)

    def _loss_scales(self) -> dict[Role, LossScale]:
        scales = {role: model.loss_scale for role, model in self.models.items()}
        return {role: scale for role, scale in scales.items() if scale is not None}

    def learn(
        self,
        share: Steps,
        outcomes: Outcomes,
        rates: Sequence[float],
        step: int,
        contract: NumericsContract,
    ) -> TrainOutcome:
        """Take one optimizer step at each of these rates, on samples drawn under this contract.

        A ParityError carries the findings of the parity check too.
        """
        shared = self.config.trainer.shares_prefixes
        steps = [[packed_batch(part, self.device, shared) for part in parts] for parts in share]
        # Corrections apply where engines may differ, or samples are stale.
        is_corrected = not contract.is_aligned or any(outcomes.lags)
        gate, apart = ParityGate.of(self.config, step, contract, outcomes.sampled), None
        try:
            metrics, learnt = self._through_stages(
                steps, outcomes, rates, gate, is_corrected=is_corrected
            )
        except ParityError as error:
            apart = gate.first_apart()
            error.findings = gate.findings(outcomes.num_samples, apart)
            if gate.on_mismatch != "fall back" or not error.is_correctable:
                raise
            logger.error("%s Going on with the fallback correction.", error)
            # No step was taken yet: score again, and train on the same rollout with corrections.
            gate = ParityGate(step, "measure")
            metrics, learnt = self._through_stages(steps, outcomes, rates, gate, is_corrected=True)
            metrics["parity/num_fallbacks"] = 1.0
        metrics |= sharing(steps, shared)
        found = gate.findings(outcomes.num_samples, apart)
        return TrainOutcome(metrics=metrics, findings=found, learnt=learnt)

    def _through_stages(
        self,
        steps: Sequence[Sequence[MicroBatch]],
        outcomes: Outcomes,
        rates: Sequence[float],
        gate: ParityGate,
        *,
        is_corrected: bool,
    ) -> tuple[Metrics, dict[int, LearntTokens]]:
        """Return the metrics of a rollout, and the learnt tokens of samples that are shown."""
        start = time.perf_counter()
        # The rollout's log-probabilities are the old policy's in bypass, and on-policy under an
        # aligned contract, where computing them again would give the same bits.
        has_old = self.corrections.bypass or not is_corrected
        k = self.corrections.kl_top_k if is_corrected else 0
        asked = self._asked(len(steps), has_old) | ({"policy"} if k else set())
        batches, scores = self._score([*chain.from_iterable(steps)], asked, k)
        batches, metrics = self._advantages(batches, outcomes, scores, has_old)
        metrics["perf/log_probs_time"] = time.perf_counter() - start
        rest = iter(batches)
        weighed, found = self._correct([[next(rest) for _ in step] for step in steps], is_corrected)
        trained, of_loss = self._loss(weighed, rates, gate)
        metrics |= found | of_loss
        if is_corrected:
            metrics |= self.corrections.measure(trained, outcomes.lags)
        return metrics | gate.metrics(), learnt_tokens(trained)

    def _score(
        self, batches: Sequence[MicroBatch], asked: set[Role], k: int
    ) -> tuple[Sequence[MicroBatch], ScoresByRole]:
        """Return the micro-batches with the inputs of a distillation loss, and with the KL over the
        engine's k likeliest tokens (0: without), and each model's scores."""
        own = [batch.packed.with_own_routing() for batch in batches]
        squares = self.estimator.reads_squares
        told = [likeliest_tokens(batch, k) for batch in batches]
        # With the rollout's experts.
        packed = [
            replace(batch.packed, wants_squares=squares, likeliest=each)
            for batch, each in zip(batches, told, strict=True)
        ]
        scores: dict[Role, Sequence[Any]] = {
            role: model.score(packed if role == "policy" else own)
            for role, model in self.models.items()
            if role in asked
        }
        if k:
            theirs = [each.log_probs for each in told if each is not None]
            ours = [each.likeliest_log_probs for each in scores["policy"]]
            kls = map(likeliest_kl, ours, theirs)
            batches = [replace(batch, kl=kl) for batch, kl in zip(batches, kls, strict=True)]
        if self.teachers is not None:
            scores["teacher"], batches = self.teachers.score(batches)
        return batches, scores

    def _asked(self, num_steps: int, has_old: bool) -> set[Role]:
        """Return the roles of the models that score a rollout before its first optimizer step."""
        pays_kl, asked = self.penalties.reads_reference, set(self.estimator.roles)
        if self.config.algorithm.use_kl_loss or pays_kl:
            asked.add("reference")
        reads_old = pays_kl or self.corrections.needs_scores(num_steps)
        if reads_old and not has_old:
            asked.add("policy")
        return asked

    def _advantages(
        self,
        batches: Sequence[MicroBatch],
        outcomes: Outcomes,
        scores: ScoresByRole,
        has_old: bool,
    ) -> tuple[list[MicroBatch], Metrics]:
        """Return the micro-batches with advantages, after penalties, and the scores that the loss
        reads."""
        count = len(batches)
        # None: the old log-probabilities are those that the loss computes.
        old = _each(scores.get("policy"), "log_probs", count)
        if has_old:
            old = [batch.rollout_log_probs for batch in batches]
        reference = _each(scores.get("reference"), "log_probs", count)
        penalties, metrics = self.penalties.of(batches, old, reference)
        ours = scored_trajectories(batches, scores, penalties)
        outcomes = after(outcomes, penalties)
        columns: dict[str, Sequence[Any]] = {
            "advantages": token_advantages(self.estimator, outcomes, batches, ours),
            "old_log_probs": old,
        }
        if self.config.algorithm.use_kl_loss:
            columns["ref_log_probs"] = reference
        if self.critic is not None:
            columns["old_values"] = _each(scores["critic"], "values", count)
            columns["returns"] = by_batch(batches, self.estimator.returns(ours))
        scored = [
            replace(batch, **{name: column[i] for name, column in columns.items()})
            for i, batch in enumerate(batches)
        ]
        metrics |= self.estimator.metrics(ours)
        if self.critic is not None:
            metrics |= known_variance(scored)
        return scored, metrics

    def _correct(
        self, scored: Sequence[Sequence[MicroBatch]], is_corrected: bool
    ) -> tuple[list[list[MicroBatch]], Metrics]:
        """Return the micro-batches with each token's part in the loss."""
        metrics = self.corrections.without_replay(scored[0], self.models["policy"])
        weighed, found = self.corrections.weigh(scored, active=is_corrected)
        return weighed, metrics | found

    def _loss(
        self, weighed: Sequence[Sequence[MicroBatch]], rates: Sequence[float], gate: ParityGate
    ) -> tuple[list[TrainedStep], Metrics]:
        """Take the optimizer steps; return each with the log-probabilities that its loss used."""
        pairs = enumerate(zip(weighed, rates, strict=True))
        updates = [self._take_step(step, rate, gate, number) for number, (step, rate) in pairs]
        metrics = {name: fmean(found[name] for found, _ in updates) for name in updates[0][0]}
        return list(zip(weighed, [used for _, used in updates], strict=True)), metrics

    def _take_step(
        self, step: Sequence[MicroBatch], rate: float, gate: ParityGate, number: int
    ) -> tuple[Metrics, list[Tensor]]:
        """Take the policy's and the critic's step of this number in a rollout; return their metrics,
        and the log-probabilities of each micro-batch that the policy's loss used."""

        def loss(scores: Scores, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            reverse_kl = getattr(scores, "reverse_kl", None)
            likeliest = getattr(scores, "likeliest_log_probs", None)
            given = scores.log_probs, batch, self.settings, scores.entropy
            return policy_loss(*given, reverse_kl, likeliest)

        first, policy = gate if number == 0 else None, self.models["policy"]
        if first is not None:
            step = self._to_compare(step, first)
        if self.critic is not None and self.critic.learns_alone(gate.step):
            metrics, log_probs = no_step(policy, step, loss, first)
        else:
            metrics, log_probs = optimizer_step(policy, step, loss, first, rate)
        if replayed := metrics.pop("routing/num_replayed", 0.0):
            metrics["routing/differing_share"] = metrics.pop("routing/num_differing") / replayed
        if self.critic is not None:
            metrics |= self.critic.take_step(step, self.critic.rate(gate.step, number))
        return metrics, log_probs

    def _to_compare(self, step: Sequence[MicroBatch], gate: ParityGate) -> Sequence[MicroBatch]:
        """Return the first step's micro-batches, with which the loss's pass cuts and draws its own
        distribution too, as far as the gate compares that."""
        if gate.stops:
            own, always = (self.cut, self.config.model), gate.expected is not None
            step = [batch.with_own_cut(*own, always=always) for batch in step]
        if gate.expected is not None:
            step = [with_draws(batch, gate.compares_rows) for batch in step]
        return step


def _each(scores: Sequence[Any] | None, name: str, count: int) -> list[Tensor | None]:
    """Return a field of a model's scores for each micro-batch; None for a model that was not asked."""
    return [None] * count if scores is None else [getattr(each, name) for each in scores]


def draws_of(sample: Sample) -> Draws:
    """Return the draws of the R sampled tokens of a sample; tokens with a known seed are chosen.

    Raises ParityError for a sample whose seeds cover more or fewer tokens.
    """
    sampled = sample.trajectory.sampled
    seeds: list[int | None] = [seed for seed, count in sample.seeds for _ in range(count)]
    positions = [place - 1 for place, is_sampled in enumerate(sampled) if is_sampled]
    if seeds and len(seeds) != len(positions):
        raise ParityError(
            f"{sample.name}: seeds={len(seeds)} tokens, sampled={len(positions)}: each sampled token "
            "has the seed of its request. Report it."
        )
    return Draws.of(seeds or [None] * len(positions), positions)


def with_draws(batch: MicroBatch, with_rows: bool = False) -> MicroBatch:
    """Return the micro-batch with its tokens from the current policy chosen to be redrawn.

    The trainer draws them from the logits of the loss's own forward pass, with the seed of a token's
    request and its position (`ops/draws.py`). with_rows: it digests their rows too.
    """
    found = [draws_of(s) for s in batch.samples]
    seeds, positions, known = (
        torch.cat([getattr(each, name) for each in found])
        for name in ("seeds", "positions", "chosen")
    )
    is_comparable = (batch.lags == 0).cpu() & batch.sampled.cpu()
    draws = Draws(seeds, positions, known & is_comparable, with_rows)
    return replace(batch, packed=replace(batch.packed, draws=draws.on(batch.packed.rows.device)))


def learnt_tokens(steps: Sequence[TrainedStep]) -> dict[int, LearntTokens]:
    """Return the part in training that the tokens of displayed samples had, on all ranks, by the
    samples' numbers; collective."""
    pairs = [pair for step in steps for pair in zip(*step, strict=True)]
    ours = {number: found for batch, own in pairs for number, found in _of_batch(batch, own)}
    return gather_by_number(ours)


def _of_batch(batch: MicroBatch, log_probs: Tensor) -> Iterator[tuple[int, LearntTokens]]:
    shown = [s.is_shown for s in batch.samples]
    if batch.is_filler or not any(shown):
        return
    weighed = completed(batch, log_probs)
    is_learnt = weighed.kept & weighed.mask
    weights = weighed.importance_weights * is_learnt
    weights = weighed.with_weights(weights, "objective")
    columns = [x.detach().cpu().split(batch.response_lens) for x in (weighed.advantages, weights)]
    for number, is_shown, advantages, factors in zip(batch.numbers, shown, *columns, strict=True):
        if is_shown:
            yield (
                number,
                LearntTokens(advantages=advantages.tolist(), weights=factors.tolist()),
            )
