"""Texts that end an answer: an engine looks for them in what it sampled for one request, and an answer
may be that of several."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.rollout.episode_rules import EpisodeRules
from onpolicy.trajectory import Completion, FinishReason, Trajectory


def until_stop_string(
    before: Sequence[int], part: Completion, stop: Sequence[str], rules: EpisodeRules
) -> Completion:
    """A later part of an answer, cut where one of the texts ends that began in what came `before`.

    SGLang's rule (its `Req.tail_str`): after every token, in the
    text of the last ones, one more than the longest of the texts has.
    """
    if not (before and stop):
        return part
    nothing = Trajectory.begin(())
    longest = max(len(rules.tokens_of(text, nothing)) for text in stop)
    whole = [*before, *part.response_ids]
    for end in range(len(before) + 1, len(whole) + 1):
        tail = rules.decode(whole[max(end - longest - 1, 0) : end])
        if any(text in tail for text in stop):
            return part.until(end - len(before), FinishReason.STOP)
    return part
