"""What both training engines do with a rollout; how gradients come about is an engine's own."""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from fallback_correction.length_decay import HasParamGroups
from fallback_correction.tokens import NonfiniteError
from onpolicy.config import TrainConfig
from onpolicy.config.groups import FallbackConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError, ParityError, TrainingError
from onpolicy.train import distributed
from onpolicy.train.batch import (
    PackedBatch,
    ScoredBatch,
    WeighedBatch,
    packed_batch,
    with_scores,
)
from onpolicy.train.correction import Corrections
from onpolicy.train.correction_flags import loss_settings
from onpolicy.train.parity_gate import ParityGate
from onpolicy.train.policy_scorer import PolicyScorer
from onpolicy.train.shares import Share, make_shares
from onpolicy.train.state import load_state, save_state
from onpolicy.types import TrainSample

logger = logging.getLogger(__name__)


class PolicyTrainer(PolicyScorer):
    """Policy-gradient steps with parity check and corrections, on an engine's verbs.

    An engine accumulates the gradients of a step, and takes it; it sets `optimizer`, and writes and
    reads its tensors.
    """

    optimizer: HasParamGroups

    def __init__(self, config: TrainConfig, contract: NumericsContract, num_threads: int):
        super().__init__(config, contract, num_threads)
        self.loss_settings = loss_settings(config)
        self.corrections = Corrections(config)

    @abstractmethod
    def _accumulate_gradients(
        self, micro_batches: Sequence[WeighedBatch], gate: ParityGate | None
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Forward, `gate.check`, loss and backward of every micro-batch.

        Returns the sums of the loss's metrics over all ranks, and the log-probabilities that the loss
        was of, float32 [R] each, detached. Raises ParityError without gradients left behind.
        """

    @abstractmethod
    def _clip_gradients(self) -> float:
        """Scale the gradients to --clip-grad; returns their norm before."""

    @abstractmethod
    def _step_optimizer(self) -> None:
        """Take the step and clear the gradients."""

    @abstractmethod
    def _write_tensors(self, directory: Path) -> None:
        """Weights and what the optimizer keeps of them, sharded, into a new directory."""

    @abstractmethod
    def _read_tensors(self, directory: Path) -> None:
        """Read back, in place, what `_write_tensors` wrote."""

    def adapt(self, contract: NumericsContract, fallback: FallbackConfig) -> None:
        if contract != self.contract:
            self._use_contract(contract)
            self._put_operators(self.operators)
        self.corrections.use(fallback)

    def train(
        self, samples: Sequence[TrainSample], step: int, rates: Sequence[float]
    ) -> dict[str, float]:
        max_tokens = self.config.trainer.max_tokens_per_gpu
        shares = make_shares(samples, len(rates), distributed.data_size(), max_tokens)
        return self.train_share(shares[distributed.data_rank()], step, rates)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()  # does nothing where there is no GPU

    def train_share(self, share: Share, step: int, rates: Sequence[float]) -> dict[str, float]:
        """`train`, by a rank that was given its own share of the samples and no other."""
        start = time.perf_counter()
        self.mismatched_tokens, self.apart = [None] * share.num_samples, None
        try:
            metrics = self._train_or_fall_back(share, rates, step)
        except NonfiniteError as error:
            how = self.corrections.flags.tis_nonfinite
            raise TrainingError(f"--tis-nonfinite={how}: {error}") from error
        seconds = time.perf_counter() - start
        return {
            **metrics,
            "perf/train_time": seconds,
            "perf/train_tokens_per_second": share.num_tokens / seconds,
        }

    def _train_or_fall_back(
        self, share: Share, rates: Sequence[float], step: int
    ) -> dict[str, float]:
        steps = [self._micro_batches(share, number) for number in range(len(rates))]
        gate, corrected = self._gate(step), not self.contract.is_aligned or any(share.lags)
        scored, perf = self._scored(steps, corrected=corrected)
        try:
            metrics = self._train_on(scored, rates, gate, corrected=corrected, lags=share.lags)
        except ParityError as error:
            self.mismatched_tokens = gate.mismatched_tokens(share)
            self.apart = gate.first_apart(share)
            if not self._falls_back:
                raise
            logger.error("%s Going on with the fallback correction.", error)
            gate = ParityGate(step, fails=False, warns=False, remedy="")
            scored, perf = self._scored_again(scored)
            metrics = self._train_on(scored, rates, gate, corrected=True)
            metrics["parity/num_fallbacks"] = 1.0
        self.mismatched_tokens = gate.mismatched_tokens(share)
        return metrics | perf

    def _train_on(
        self,
        steps: list[list[ScoredBatch]],
        rates: Sequence[float],
        gate: ParityGate,
        *,
        corrected: bool,
        lags: Sequence[int] = (),
    ) -> dict[str, float]:
        """The optimizer steps of a rollout; `corrected`: as one that is not on-policy."""
        metrics = self._own_routing(steps[0])
        weighed, found = self.corrections.weigh(steps, active=corrected)
        updates = [
            self._optimizer_step(micro_batches, rate, gate if number == 0 else None)
            for number, (micro_batches, rate) in enumerate(zip(weighed, rates, strict=True))
        ]
        metrics |= found | {
            name: fmean(update[name] for update, _ in updates) for name in updates[0][0]
        }
        if corrected:
            train_log_probs = [log_probs for _, log_probs in updates]
            trained = list(zip(weighed, train_log_probs, strict=True))
            metrics |= self.corrections.measure(trained) | self.corrections.measure_lags(
                trained, lags
            )
        return {**metrics, **gate.reduce().metrics()}

    def _optimizer_step(
        self, micro_batches: Sequence[WeighedBatch], rate: float, gate: ParityGate | None
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Its metrics, and the log-probabilities of each micro-batch that its loss was of."""
        sums, train_log_probs = self._accumulate_gradients(micro_batches, gate)
        grad_norm = self._clip_gradients()
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"grad_norm={grad_norm}: a gradient is not finite, so no optimizer step was taken. "
                "Lower --lr, or resume from the last checkpoint with --load."
            )
        if replayed := sums.pop("routing/num_replayed", 0.0):
            sums["routing/differing_share"] = sums.pop("routing/num_differing") / replayed
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._step_optimizer()
        return {**sums, "train/grad_norm": grad_norm, "train/lr": rate}, train_log_probs

    def _own_routing(self, step: Sequence[PackedBatch]) -> dict[str, float]:
        """How far the engines would be apart without the rollout's experts, if it is measured."""
        replays = distributed.any_data(any(b.packed.routed_experts is not None for b in step))
        if not replays or not self.corrections.wants_metrics:
            return {}
        scores = self._score([batch.packed.with_own_routing() for batch in step])
        return {"routing/k3_without_replay": self.corrections.k3(step, scores)}

    @property
    def _falls_back(self) -> bool:
        return self.contract.is_aligned and self.config.parity_policy == "fallback"

    def _gate(self, step: int) -> ParityGate:
        # What an unaligned rollout mismatches by stands in the metrics; it is no news in the log.
        aligned, asked = self.contract.is_aligned, self.config.parity.parity_policy
        fails = asked == "fail" or (aligned and self.config.parity_policy in ("fail", "fallback"))
        output = self.config.output
        load = f" --load {output.save}" if output.save else ""
        remedy = (
            "To find out which operator differs, and in which layer, run: onpolicy explain --case "
            f"{output.case_file(step)} --hf-checkpoint {self.config.model.hf_checkpoint}{load}"
        )
        return ParityGate(step, fails=fails, warns=aligned, remedy=remedy)

    def _micro_batches(self, share: Share, number: int) -> list[PackedBatch]:
        """Of an optimizer step."""
        temperature = self.config.rollout.rollout_temperature
        return [packed_batch(s, temperature, self.device) for s in share.micro_batches(number)]

    def _scored(
        self, steps: list[list[PackedBatch]], *, corrected: bool
    ) -> tuple[list[list[ScoredBatch]], dict[str, float]]:
        """Old and reference log-probabilities, before the first optimizer step changes anything."""
        start = time.perf_counter()
        batches = [batch for step in steps for batch in step]
        old = iter(self._old_log_probs(batches, len(steps), corrected=corrected))
        reference = iter(self._reference_log_probs(batches))
        scored = [[with_scores(b, next(old), next(reference)) for b in step] for step in steps]
        return scored, {"perf/log_probs_time": time.perf_counter() - start}

    def _scored_again(
        self, steps: list[list[ScoredBatch]]
    ) -> tuple[list[list[ScoredBatch]], dict[str, float]]:
        """The same of a rollout that is corrected after all; the reference's do not change."""
        start = time.perf_counter()
        batches = [batch for step in steps for batch in step]
        old = iter(self._old_log_probs(batches, len(steps), corrected=True))
        scored = [[replace(batch, old_log_probs=next(old)) for batch in step] for step in steps]
        return scored, {"perf/log_probs_time": time.perf_counter() - start}

    def _old_log_probs(
        self, batches: Sequence[PackedBatch], num_steps: int, *, corrected: bool
    ) -> Sequence[Tensor | None]:
        """The rollout's in bypass, and on policy under an aligned contract, where computing them again
        would give the same bits; None where the loss's own are they."""
        if not corrected or self.corrections.bypass:
            return [batch.rollout_log_probs for batch in batches]
        if not self.corrections.needs_scores(num_steps):
            return [None] * len(batches)
        return self._score([batch.packed for batch in batches])

    def _reference_log_probs(self, batches: Sequence[PackedBatch]) -> Sequence[Tensor | None]:
        if not self.config.algorithm.use_kl_loss:
            return [None] * len(batches)
        return self._score([b.packed.with_own_routing() for b in batches], reference=True)

    def save(self, directory: Path) -> None:
        numbers = {"corrections": self.corrections.state_dict()}
        save_state(directory, numbers, self._write_tensors)

    def load(self, directory: Path) -> None:
        numbers = load_state(directory, self._read_tensors)
        try:
            self.corrections.load_state_dict(numbers["corrections"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"--load: what the checkpoint holds of the corrections does not fit these settings "
                f"({error!r}). Give --dc-* as in the run that wrote it."
            ) from error
