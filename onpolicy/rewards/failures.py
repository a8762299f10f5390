"""Failures of rules: logged, counted, and bounded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from onpolicy.errors import RewardError
from onpolicy.rewards import Failure, Numbers
from onpolicy.types import Sample

logger = logging.getLogger(__name__)


class Failures:
    """The failures of a run's rules; each rule's first is logged with all details."""

    def __init__(self, limit: float):
        """Take `limit`, the share of samples scored at once on which a rule may fail."""
        self._limit, self._reported = limit, set[str]()

    def count(
        self,
        name: str,
        pairs: Sequence[tuple[Sample, Numbers | Failure]],
        metrics: dict[str, float],
    ) -> None:
        """Add the failures of the rule `name` to the metrics, and log them. Raises RewardError if
        they are too many."""
        failed = [(sample, answer) for sample, answer in pairs if isinstance(answer, Failure)]
        if not failed:
            return
        num_late = sum(failure.is_late for _, failure in failed)
        metrics["rollout/reward_timeouts"] += num_late
        metrics["rollout/reward_errors"] += len(failed) - num_late
        sample, failure = failed[0]
        count = f"{name}: {len(failed)} of {len(pairs)} samples could not be scored"
        logger.warning(
            "%s; nothing is learnt from them, and a run in which they can be scored has another hash. "
            "The first, %s, %s", count, sample.name, failure.reason,
        )  # fmt: skip
        if name not in self._reported:
            self._reported.add(name)
            logger.error(
                "The first failure of %s: %s, label %r, response %.500r\n%s",
                name, sample.name, sample.prompt.label, sample.response, failure.traceback,
            )  # fmt: skip
        self._require_few(count, failed, len(pairs))

    def _require_few(
        self, count: str, failed: Sequence[tuple[Sample, Failure]], num_samples: int
    ) -> None:
        mend = "Mend the rule and resume from the last checkpoint with --load"
        for _, failure in failed:
            if failure.in_loading:
                raise RewardError(f"{count}: a new worker {failure.reason}. {mend}.")
        if len(failed) > self._limit * num_samples:
            sample, failure = failed[0]
            late = " or a higher --rm-time-limit," if failure.is_late else ""
            raise RewardError(
                f"{count}, more than --rm-max-error-rate={self._limit:g} of them. The first, "
                f"{sample.name}, {failure.reason}. {mend},{late} or raise the limit."
            )
