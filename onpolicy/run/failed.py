"""Failed attempts at episodes: their metrics, and their records for the sample log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from onpolicy.outputs.samples import FailedAttempt
from onpolicy.rollout.open_groups import OpenGroup


def failed_attempts(groups: Sequence[OpenGroup]) -> list[FailedAttempt]:
    """Return the failed attempts of groups, complete or not."""
    return [
        FailedAttempt(
            prompt=group.prompt,
            group=group.number,
            sample_index=place,
            attempt=attempt,
            reason=failure.reason,
            message=failure.message,
            said=failure.said,
        )
        for group in groups
        for place, episode in enumerate(group.episodes)
        for attempt, failure in enumerate(episode.failures)
    ]


def failure_metrics(failed: Sequence[FailedAttempt]) -> dict[str, float]:
    """Return the number of failed attempts, in total and by reason."""
    reasons = Counter(f"rollout/failed_episodes/{each.reason}" for each in failed)
    return {"rollout/num_failed_episodes": float(len(failed))} | {
        name: float(count) for name, count in sorted(reasons.items())
    }
