"""The parity check of a training step: before a backward pass, and on all ranks at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from onpolicy.errors import ParityError
from onpolicy.parity import Mismatch, ParityCounts, compare_log_probs, mismatches
from onpolicy.train.batch import PackedBatch
from onpolicy.train.distributed import count_over_data, gather_data, gather_micro_batches
from onpolicy.types import TrainSample

logger = logging.getLogger(__name__)


class ParityGate:
    """Compares the log-probabilities of the loss's own forward pass with the rollout's.

    Only the first optimizer step of a rollout is comparable: after it the policy has changed.
    """

    def __init__(self, step: int, *, fails: bool, warns: bool, remedy: str):
        self.step, self.fails, self.warns, self.remedy = step, fails, warns, remedy
        self._counts: list[ParityCounts] = []
        self._by_sample: dict[int, int] = {}

    def check(self, log_probs: Tensor, batch: PackedBatch) -> None:
        """Compare float32 [R]; raise ParityError on every rank if any token of any rank differs."""
        counts, first = ParityCounts(), None
        if not batch.is_filler:
            counts, first = compare_log_probs(log_probs.detach(), batch.rollout_log_probs)
            self._count_by_sample(log_probs, batch)
        self._counts.append(counts)
        if not self.fails:
            return
        ours = {"compared": counts.num_compared, "mismatched": counts.num_mismatched}
        totals = count_over_data(ours, log_probs.device)
        mismatched, compared = totals["mismatched"], totals["compared"]
        if mismatched:
            found = None if first is None else self._mismatch(log_probs, batch, first)
            example = next(m for m in gather_data(found) if m is not None)
            raise ParityError(
                f"{mismatched} of {compared} tokens have another log-probability in training than in "
                f"the rollout. First: {example}. No step was taken. {self.remedy}"
            )

    def reduce(self) -> ParityCounts:
        """The counts of all micro-batches; says so if tokens differed and the run goes on."""
        total = sum(gather_micro_batches(self._counts), ParityCounts())
        if self.warns and total.num_mismatched:
            logger.warning(
                "step %d: %d of %d tokens have another log-probability in training",
                self.step, total.num_mismatched, total.num_compared,
            )  # fmt: skip
        return total

    def mismatched_tokens(self, samples: Sequence[TrainSample]) -> list[int | None]:
        """How many tokens of each sample differ; None where none was compared. Collective.

        `samples` are those that the checked batches were made of.
        """
        ours = self._by_sample
        mine = {i: ours[id(sample)] for i, sample in enumerate(samples) if id(sample) in ours}
        found = {i: count for share in gather_data(mine) for i, count in share.items()}
        return [found.get(i) for i in range(len(samples))]

    def _count_by_sample(self, log_probs: Tensor, batch: PackedBatch) -> None:
        differ = mismatches(log_probs.detach(), batch.rollout_log_probs).cpu()
        for sample, part in zip(batch.samples, differ.split(batch.response_lens), strict=True):
            self._by_sample[id(sample)] = int(part.sum())

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
