"""The parity check of a training step, before a backward pass and on all ranks at once."""

from __future__ import annotations

import logging

from torch import Tensor

from onpolicy.config import TrainConfig
from onpolicy.config.plan import OnMismatch
from onpolicy.contract import NumericsContract
from onpolicy.errors import ParityError
from onpolicy.parity import (
    ParityCounts,
    compare_draws,
    compare_log_probs,
    compare_rows,
    mismatches,
    two_digests,
    ulp_distance,
)
from onpolicy.training.batch import MicroBatch
from onpolicy.training.distributed import (
    count_over_data,
    gather_by_number,
    gather_data,
    gather_micro_batches,
)
from onpolicy.training.shares import SampledTokens
from onpolicy.types import ParityFindings

logger = logging.getLogger(__name__)

ENGINES = (
    "Have engines of this version of onpolicy (`onpolicy train`, `onpolicy serve`) sample, with nothing "
    "beside it that changes SGLang's sampler or a request's sampling_seed."
)


class ParityGate:
    """Comparison of the loss's own log-probabilities with the rollout's, of the sampled tokens with the
    trainer's own draws, and, if it `compares_rows`, of digests of the whole vocabulary's
    log-probabilities.

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
        compares_rows: bool = False,
    ):
        self.step, self.on_mismatch, self.remedy = step, on_mismatch, remedy
        self.expected, self.compares_rows = expected, compares_rows
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
        if not contract.is_aligned:
            return ParityGate(step, policy, remedy)
        return ParityGate(step, policy, remedy, sampled, config.parity.parity_check == "full")

    @property
    def stops(self) -> bool:
        """Return whether a mismatch keeps a step from being taken."""
        return self.on_mismatch in ("fail", "fall back")

    def check(
        self,
        log_probs: Tensor,
        batch: MicroBatch,
        drawn: Tensor | None = None,
        row_digests: Tensor | None = None,
    ) -> None:
        """Compare float32 [R]; raise ParityError on every rank if any token of any rank differs.

        drawn: float32 [R], the redrawn tokens, NaN for the others; row_digests: int64 [R].
        """
        counts, apart, otherwise, of_row = ParityCounts(), None, None, None
        lost = self._num_lost(log_probs, batch, drawn, row_digests)
        if not (batch.is_filler or lost):
            counts, apart = self._compared(log_probs, batch)
            if drawn is not None:
                found, otherwise = self._compared_draws(drawn, batch)
                counts += found
            if row_digests is not None and self.compares_rows:
                found, of_row = self._compared_rows(row_digests, batch)
                counts += found
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
            "rows": counts.num_mismatched_rows,
            "lost": lost,
        }
        totals = count_over_data(ours, log_probs.device)
        compared = totals["compared"]
        if lost := totals["lost"]:
            raise self._lost(lost)
        if mismatched := totals["mismatched"]:
            raise ParityError(
                f"{mismatched} of {compared} tokens have another log-probability in training than in "
                f"the rollout. First: {_first(apart)}. No step was taken. {self.remedy}"
            )
        if count := totals["otherwise"]:
            raise _beyond_correction(
                f"{count} of {totals['redrawn']} tokens that were drawn again are others than the "
                "rollout's, at the same log-probabilities: a sampled token must be the one that its "
                "request's seed draws at its position from the policy's own distribution. First: "
                f"{_first(otherwise)}. No step was taken. {ENGINES}"
            )
        if rows := totals["rows"]:
            raise ParityError(
                f"{rows} of {compared} tokens have the same log-probability in training as in the "
                "rollout, and other tokens of the vocabulary have another: the digests of their "
                f"rows differ. First: {_first(of_row)}. No step was taken. `onpolicy verify "
                "--full-vocabulary` looks for it on this checkpoint, and `onpolicy explain` names the "
                "operator where a sampled token differs."
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
        for count, of, what in (
            (total.num_mismatched, total.num_compared, "have another log-probability in training"),
            (total.num_drawn_otherwise, total.num_redrawn,
                "that were drawn again are others than the rollout's"),
            (total.num_mismatched_rows, total.num_compared_rows,
                "have another distribution over the vocabulary in training"),
        ):  # fmt: skip
            if self.on_mismatch == "warn" and count:
                logger.warning("step %d: %d of %d tokens %s", self.step, count, of, what)
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

    def _compared(self, log_probs: Tensor, batch: MicroBatch) -> tuple[ParityCounts, str | None]:
        """Compare the tokens of the current policy, and describe the first mismatch."""
        fresh = (batch.lags == 0).nonzero()[:, 0]
        self._count_by_sample(log_probs, batch)
        if not len(fresh):
            return ParityCounts(), None
        train, rollout = log_probs.detach()[fresh], batch.rollout_log_probs[fresh]
        counts, first = compare_log_probs(train, rollout)
        if first is None:
            return counts, None
        ours, theirs = train[first], rollout[first]
        cut = batch.packed.kept is not None and bool(ours.isnan())
        why = " (nan: the trainer's own cut keeps other tokens)" if cut else ""
        return counts, (
            f"{self._place(batch, int(fresh[first]))}: rollout={theirs.item()!r}, "
            f"train={ours.item()!r}, ulp={int(ulp_distance(ours, theirs))}{why}"
        )

    def _compared_draws(self, drawn: Tensor, batch: MicroBatch) -> tuple[ParityCounts, str | None]:
        """Compare the redrawn tokens, and describe the first that was drawn differently."""
        counts, row = compare_draws(drawn, batch.packed.targets)
        if row is None:
            return counts, None
        draws = batch.packed.draws
        assert draws is not None
        return counts, (
            f"{self._place(batch, row)}: rollout={int(batch.packed.targets[row])}, "
            f"train={int(drawn[row])}, sampling_seed={int(draws.seeds[row])}, "
            f"position={int(draws.positions[row])}"
        )

    def _compared_rows(
        self, row_digests: Tensor, batch: MicroBatch
    ) -> tuple[ParityCounts, str | None]:
        """Compare the rows of the current policy's tokens, and describe the first mismatch."""
        fresh = (batch.lags == 0).nonzero()[:, 0]
        counts, first = compare_rows(row_digests[fresh], batch.rollout_digests[fresh])
        if first is None:
            return counts, None
        row = int(fresh[first])
        digests = int(row_digests[row]), int(batch.rollout_digests[row])
        said = two_digests(int(batch.packed.targets[row]), *digests)
        return counts, f"{self._place(batch, row)}: {said}"

    def _place(self, batch: MicroBatch, row: int) -> str:
        """Return the step, the sample and the position of a sampled token, for messages."""
        sample, position = batch.locate(row)
        return f"step={self.step}, {sample.name}, response position={position}"

    def _num_lost(
        self,
        log_probs: Tensor,
        batch: MicroBatch,
        drawn: Tensor | None,
        row_digests: Tensor | None,
    ) -> int:
        """Count the sampled tokens without a log-probability or a digest and the chosen tokens that
        were not redrawn, or those in excess."""
        if batch.is_filler:
            return 0
        asked = 0 if (draws := batch.packed.draws) is None else int(draws.chosen.sum())
        found = 0 if drawn is None else int((~drawn.isnan()).sum())
        rows = 0 if row_digests is None else len(row_digests)
        without = len(batch.rollout_digests) - rows if self.compares_rows else 0
        missing = len(batch.rollout_log_probs) - len(log_probs)
        return abs(missing) + abs(asked - found) + abs(without)

    def _lost(self, count: int) -> ParityError:
        return _beyond_correction(
            f"step={self.step}: what the trainer says of a micro-batch is off by {count} tokens: it "
            "must have one log-probability of each sampled token, draw those again that it was to, and "
            "digest their rows if it was to. No step was taken. Report it, with the run's log."
        )

    def _count_by_sample(self, log_probs: Tensor, batch: MicroBatch) -> None:
        differ = mismatches(log_probs.detach(), batch.rollout_log_probs).cpu()
        lens, fresh = batch.response_lens, batch.lags.cpu() == 0
        parts = differ.split(lens), fresh.split(lens), log_probs.split(lens)
        for number, part, is_fresh, scores in zip(batch.numbers, *parts, strict=True):
            if is_fresh.any():
                count = self._by_sample[number] = int(part[is_fresh].sum())
                if count and self._apart is None:
                    self._apart = number, scores.tolist()


def _first(told: str | None) -> str:
    """Return the description of the first rank that has one; collective."""
    return next(each for each in gather_data(told) if each is not None)


def _beyond_correction(message: str) -> ParityError:
    """Return an error that also ends a run which may fall back to a correction."""
    error = ParityError(message)
    error.is_correctable = False
    return error
