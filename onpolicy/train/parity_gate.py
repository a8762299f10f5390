"""The parity check of a training step, before a backward pass and on all ranks at once."""

from __future__ import annotations

import logging
import math

from torch import Tensor

from onpolicy.config import TrainConfig
from onpolicy.config.plan import OnMismatch
from onpolicy.contract import NumericsContract
from onpolicy.errors import ParityError
from onpolicy.parity import Mismatch, ParityCounts, compare_draws, compare_log_probs, mismatches
from onpolicy.train.batch import PackedBatch
from onpolicy.train.distributed import (
    count_over_data,
    gather_by_number,
    gather_data,
    gather_micro_batches,
)
from onpolicy.train.shares import SampledTokens
from onpolicy.types import ParityFindings

logger = logging.getLogger(__name__)

ENGINES = (
    "Have engines of this version of onpolicy (`onpolicy train`, `onpolicy serve`) sample, with nothing "
    "beside it that changes SGLang's sampler or a request's sampling_seed."
)


class ParityGate:
    """Comparison of the loss's own log-probabilities with the rollout's, and of the sampled tokens with
    the trainer's own draws.

    Only the first optimizer step of a rollout is comparable, since the policy changes after it, and in
    it only tokens sampled from the current policy, not from earlier weights. `expected`: how many
    tokens must be compared; None where that is not promised.
    """

    def __init__(
        self,
        step: int,
        on_mismatch: OnMismatch,
        remedy: str = "",
        expected: SampledTokens | None = None,
    ):
        self.step, self.on_mismatch, self.remedy = step, on_mismatch, remedy
        self.expected = expected
        self._counts: list[ParityCounts] = []
        self._by_sample: dict[int, int] = {}
        self._apart: tuple[int, list[float]] | None = None

    @staticmethod
    def of(
        config: TrainConfig, step: int, contract: NumericsContract, sampled: SampledTokens
    ) -> ParityGate:
        """Return the gate of a rollout that was sampled under a contract."""
        output = config.output
        load = f" --load {output.save}" if output.save else ""
        remedy = (
            "To find out which operator differs, and in which layer, run: onpolicy explain --case "
            f"{output.case_file(step)} --hf-checkpoint {config.model.hf_checkpoint}{load}"
        )
        policy = config.plan.on_mismatch(is_aligned=contract.is_aligned)
        return ParityGate(step, policy, remedy, sampled if contract.is_aligned else None)

    @property
    def stops(self) -> bool:
        """Return whether a mismatch keeps a step from being taken."""
        return self.on_mismatch in ("fail", "fall back")

    def check(
        self,
        log_probs: Tensor,
        batch: PackedBatch,
        entropy: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> None:
        """Compare float32 [R]; raise ParityError on every rank if any token of any rank differs.

        entropy: float32 [R], compared where engines reported it. drawn: float32 [R], the redrawn
        tokens, NaN for the others.
        """
        counts, first, first_drawn, others = ParityCounts(), None, None, 0
        lost = self._num_lost(log_probs, batch, drawn)
        if not (batch.is_filler or lost):
            counts, first = self._compared(log_probs, batch)
            if drawn is not None:
                of_draws, first_drawn = compare_draws(drawn, batch.packed.targets)
                counts += of_draws
            if entropy is not None and batch.rollout_entropy is not None:
                differ = mismatches(entropy.detach(), batch.rollout_entropy)
                others = int(differ[batch.lags == 0].sum())
        self._counts.append(counts)
        if not self.stops:
            if lost:
                raise self._lost(lost)
            return
        # Every rank needs the totals, so that all raise or none does.
        ours = {
            "compared": counts.num_compared,
            "mismatched": counts.num_mismatched,
            "redrawn": counts.num_redrawn,
            "otherwise": counts.num_drawn_otherwise,
            "others": others,
            "lost": lost,
        }
        totals = count_over_data(ours, log_probs.device)
        mismatched, compared = totals["mismatched"], totals["compared"]
        if lost := totals["lost"]:
            raise self._lost(lost)
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
        if otherwise := totals["otherwise"]:
            told = None if first_drawn is None else self._draw_of(batch, drawn, first_drawn)
            first_of_all = next(x for x in gather_data(told) if x is not None)
            raise _beyond_correction(
                f"{otherwise} of {totals['redrawn']} tokens that were drawn again are others than the "
                "rollout's, at the same log-probabilities: a sampled token must be the one that its "
                "request's seed draws at its position from the policy's own distribution. First: "
                f"{first_of_all}. No step was taken. {ENGINES}"
            )

    def require_all(self) -> None:
        """Raise ParityError on every rank, before a step is taken, unless all comparable tokens were
        compared; collective."""
        if self.expected is None or not self.stops:
            return
        found = sum(gather_data(sum(c.num_compared for c in self._counts)))
        expected = self.expected
        if found == expected.compared and expected.all:
            return
        raise _beyond_correction(
            f"step={self.step}: {found} tokens were compared with the rollout, and {expected.all} were "
            f"sampled, of which {expected.older} come from earlier weights and {expected.later} belong "
            "to later optimizer steps: all others must be compared, and there must be sampled tokens. "
            "No step was taken. Report it, with the run's log."
        )

    def reduce(self) -> ParityCounts:
        """Return the counts of all micro-batches; log a warning if tokens differed and the run
        goes on."""
        total = sum(gather_micro_batches(self._counts), ParityCounts())
        if self.on_mismatch == "warn" and total.num_mismatched:
            logger.warning(
                "step %d: %d of %d tokens have another log-probability in training",
                self.step, total.num_mismatched, total.num_compared,
            )  # fmt: skip
        if self.on_mismatch == "warn" and total.num_drawn_otherwise:
            logger.warning(
                "step %d: %d of %d tokens that were drawn again are others than the rollout's",
                self.step, total.num_drawn_otherwise, total.num_redrawn,
            )  # fmt: skip
        return total

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the comparison; collective."""
        total = self.reduce()
        if self.expected is None:
            return total.metrics()
        excused = self.expected.older + self.expected.later
        return {
            **total.metrics(),
            **total.draws("parity/"),
            "parity/num_excused_tokens": excused,
        }

    def findings(self, num_samples: int, apart: tuple[int, list[float]] | None) -> ParityFindings:
        """Return how many tokens of each sample of the rollout differ, with the first mismatch if the
        check failed; collective."""
        found = gather_by_number(self._by_sample)
        counts = [found.get(i) for i in range(num_samples)]
        return ParityFindings(mismatched_tokens=counts, apart=apart)

    def first_apart(self) -> tuple[int, list[float]] | None:
        """Return the first sample with a token that differed, as far as was checked, and the trainer's
        log-probabilities of it; None if there is none; collective."""
        everyones = gather_data(self._apart)
        return min((found for found in everyones if found is not None), default=None)

    def _compared(self, log_probs: Tensor, batch: PackedBatch) -> tuple[ParityCounts, int | None]:
        """Compare the tokens of the current policy; the first mismatch is an index among all R."""
        fresh = (batch.lags == 0).nonzero()[:, 0]
        self._count_by_sample(log_probs, batch)
        if not len(fresh):
            return ParityCounts(), None
        pair = log_probs.detach()[fresh], batch.rollout_log_probs[fresh]
        counts, first = compare_log_probs(*pair)
        return counts, None if first is None else int(fresh[first])

    def _num_lost(self, log_probs: Tensor, batch: PackedBatch, drawn: Tensor | None) -> int:
        """Count the sampled tokens without a log-probability and the chosen tokens that were not
        redrawn, or those in excess."""
        if batch.is_filler:
            return 0
        asked = 0 if (draws := batch.packed.draws) is None else int(draws.chosen.sum())
        found = 0 if drawn is None else int((~drawn.isnan()).sum())
        return abs(len(batch.rollout_log_probs) - len(log_probs)) + abs(asked - found)

    def _lost(self, count: int) -> ParityError:
        return _beyond_correction(
            f"step={self.step}: what the trainer says of a micro-batch is off by {count} tokens: it "
            "must have one log-probability of each sampled token, and draw those again that it was "
            "to. No step was taken. Report it, with the run's log."
        )

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

    def _draw_of(self, batch: PackedBatch, drawn: Tensor | None, row: int) -> str:
        """Describe a token that was drawn differently, for messages."""
        assert drawn is not None and batch.packed.draws is not None
        sample, position = batch.locate(row)
        draws = batch.packed.draws
        return (
            f"step={self.step}, {sample.sample.name}, response position={position}: "
            f"rollout={int(batch.packed.targets[row])}, train={int(drawn[row])}, "
            f"sampling_seed={int(draws.seeds[row])}, position={int(draws.positions[row])}"
        )


def _beyond_correction(message: str) -> ParityError:
    """Return an error that also ends a run which may fall back to a correction."""
    error = ParityError(message)
    error.is_correctable = False
    return error
