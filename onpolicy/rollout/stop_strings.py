"""Stop strings in answers that span several requests: an engine searches one request's tokens only."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.rollout.episode_rules import EpisodeRules
from onpolicy.trajectory import Completion, FinishReason, Trajectory


def until_stop_string(
    before: Sequence[int], part: Completion, stop: Sequence[str], rules: EpisodeRules
) -> Completion:
    """Return a later part of an answer, cut where a stop string ends that began in the tokens
    `before`.

    Follows SGLang's `Req.tail_str`: after every token, it searches the text of the last tokens, one
    more than the longest stop string has.
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
