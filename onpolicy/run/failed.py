"""Attempts at episodes that came to nothing: what is counted, and what people are shown of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from onpolicy.outputs.samples import FailedAttempt
from onpolicy.rollout.open_groups import OpenGroup


def failed_attempts(groups: Sequence[OpenGroup]) -> list[FailedAttempt]:
    """Those of some groups, whether these are complete or not."""
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
    """How many there are, and of which reasons."""
    reasons = Counter(f"rollout/failed_episodes/{each.reason}" for each in failed)
    return {"rollout/num_failed_episodes": float(len(failed))} | {
        name: float(count) for name, count in sorted(reasons.items())
    }
