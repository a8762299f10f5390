"""The parity check of a training step: before a backward pass, and on all ranks at once."""

from __future__ import annotations

import logging
import math

from torch import Tensor

from onpolicy.config.plan import OnMismatch
from onpolicy.errors import ParityError
from onpolicy.parity import Mismatch, ParityCounts, compare_log_probs, mismatches
from onpolicy.train.batch import PackedBatch
from onpolicy.train.distributed import (
    count_over_data,
    gather_by_number,
    gather_data,
    gather_micro_batches,
)
from onpolicy.types import ParityFindings

logger = logging.getLogger(__name__)


class ParityGate:
    """Compares the log-probabilities of the loss's own forward pass with the rollout's.

    Only the first optimizer step of a rollout is comparable, after which the policy has changed, and in
    it only the tokens that were sampled from this policy, not from earlier weights.
    """

    def __init__(self, step: int, on_mismatch: OnMismatch, remedy: str = ""):
        self.step, self.on_mismatch, self.remedy = step, on_mismatch, remedy
        self._counts: list[ParityCounts] = []
        self._by_sample: dict[int, int] = {}
        self._apart: tuple[int, list[float]] | None = None

    def check(self, log_probs: Tensor, batch: PackedBatch, entropy: Tensor | None = None) -> None:
        """Compare float32 [R]; raise ParityError on every rank if any token of any rank differs.

        entropy: float32 [R], which is compared where engines told it.
        """
        counts, first, others = ParityCounts(), None, 0
        if not batch.is_filler:
            fresh = (batch.lags == 0).nonzero()[:, 0]
            counts, first = compare_log_probs(
                log_probs.detach()[fresh], batch.rollout_log_probs[fresh]
            )
            first = None if first is None else int(fresh[first])
            self._count_by_sample(log_probs, batch)
            if entropy is not None and batch.rollout_entropy is not None:
                differ = mismatches(entropy.detach(), batch.rollout_entropy)
                others = int(differ[fresh].sum())
        self._counts.append(counts)
        if self.on_mismatch not in ("fail", "fall back"):
            return
        ours = {
            "compared": counts.num_compared,
            "mismatched": counts.num_mismatched,
            "others": others,
        }
        totals = count_over_data(ours, log_probs.device)
        mismatched, compared = totals["mismatched"], totals["compared"]
        if mismatched:
            found = None if first is None else self._mismatch(log_probs, batch, first)
            example = next(m for m in gather_data(found) if m is not None)
            kept = batch.packed.kept is not None and math.isnan(example.train_log_prob)
            why = " (nan: the trainer's own cut keeps other tokens)" if kept else ""
            raise ParityError(
                f"{mismatched} of {compared} tokens have another log-probability in training than in "
                f"the rollout. First: {example}{why}. No step was taken. {self.remedy}"
            )
        if others := totals["others"]:
            raise ParityError(
                f"{others} of {compared} tokens have another entropy in training than engines told, by "
                "which tokens were told apart, and the same log-probability. No step was taken. Leave "
                "--top-entropy-quantile out, and report it: both are of one distribution."
            )

    def reduce(self) -> ParityCounts:
        """The counts of all micro-batches; says so if tokens differed and the run goes on."""
        total = sum(gather_micro_batches(self._counts), ParityCounts())
        if self.on_mismatch == "warn" and total.num_mismatched:
            logger.warning(
                "step %d: %d of %d tokens have another log-probability in training",
                self.step, total.num_mismatched, total.num_compared,
            )  # fmt: skip
        return total

    def findings(self, num_samples: int, apart: tuple[int, list[float]] | None) -> ParityFindings:
        """How many tokens of each sample of the rollout differ; with the first if the check failed.
        Collective."""
        found = gather_by_number(self._by_sample)
        counts = [found.get(i) for i in range(num_samples)]
        return ParityFindings(mismatched_tokens=counts, apart=apart)

    def first_apart(self) -> tuple[int, list[float]] | None:
        """The first sample of which a token differed, as far as was checked, and what the trainer gives
        its tokens; None if there is none. Collective.
        """
        everyones = gather_data(self._apart)
        return min((found for found in everyones if found is not None), default=None)

    def _count_by_sample(self, log_probs: Tensor, batch: PackedBatch) -> None:
        differ = mismatches(log_probs.detach(), batch.rollout_log_probs).cpu()
        lens, fresh = batch.response_lens, batch.lags.cpu() == 0
        parts = differ.split(lens), fresh.split(lens), log_probs.split(lens)
        for number, part, is_fresh, scores in zip(batch.numbers, *parts, strict=True):
            if is_fresh.any():
                count = self._by_sample[number] = int(part[is_fresh].sum())
                if count and self._apart is None:
                    self._apart = number, scores.tolist()

    def _mismatch(self, log_probs: Tensor, batch: PackedBatch, row: int) -> Mismatch:
        sample, position = batch.locate(row)
        train, rollout = log_probs[row].detach(), batch.rollout_log_probs[row]
        counts, _ = compare_log_probs(train[None], rollout[None])
        return Mismatch(
            step=self.step,
            sample=sample.sample.name,
            position=position,
            rollout_log_prob=rollout.item(),
            train_log_prob=train.item(),
            ulp=counts.max_ulp,
        )
