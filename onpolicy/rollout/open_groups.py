"""Groups of responses that are drawn in rounds, in an order that depends on no arrival.

A round advances a constant number of responses, each by a limited number of tokens: a response that is
not complete goes on in the next round, under the weights that the engines hold by then, as a request
that continues it. Its seed is the same, and the sampler draws by the absolute position of a token, so
under the same weights a response has the same tokens in one piece or in many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onpolicy.types import Completion, FinishReason, Prompt, Request, Span


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """A prompt, and its responses so far."""

    number: int
    """Position in the endless order of prompts."""

    prompt: Prompt

    requests: list[Request]
    """For each response as a whole."""

    completions: list[Completion | None]
    """What there is of each."""

    def is_complete(self, i: int) -> bool:
        """Whether response `i` is."""
        so_far, most = self.completions[i], self.requests[i].params.max_new_tokens
        if so_far is None:
            return False
        return so_far.finish_reason == FinishReason.STOP or len(so_far.response_ids) == most

    def add(self, i: int, more: Completion) -> None:
        """What response `i` goes on with."""
        so_far = self.completions[i]
        self.completions[i] = more if so_far is None else joined(so_far, more)

    @property
    def unfinished(self) -> list[int]:
        """The responses that are not complete."""
        return [i for i in range(len(self.requests)) if not self.is_complete(i)]


Slot = tuple[OpenGroup, int]
"""A response: its group, and its place in it."""


class OpenGroups:
    """The groups that are not complete, by their numbers.

    `open_group`: makes the group of a number. `width`: responses in a round. `tokens`: what each may
    grow by in it.
    """

    def __init__(self, open_group: Callable[[int], OpenGroup], width: int, tokens: int):
        self._open_group, self._width, self._tokens = open_group, width, tokens
        self.next_number, self.groups = 0, list[OpenGroup]()

    def next_round(self) -> list[Slot]:
        """The first responses that are not complete; groups are opened until there are enough."""
        slots = [(group, i) for group in self.groups for i in group.unfinished]
        while len(slots) < self._width:
            group = self._open_group(self.next_number)
            self.next_number += 1
            self.groups.append(group)
            slots += [(group, i) for i in group.unfinished]
        return slots[: self._width]

    def request(self, slot: Slot, tokens: int | None = None) -> Request:
        """What continues a response by a round, or by at most so many tokens."""
        group, i = slot
        whole, so_far = group.requests[i], group.completions[i]
        done = so_far.response_ids if so_far else []
        left = whole.params.max_new_tokens - len(done)
        params = replace(whole.params, max_new_tokens=min(left, tokens or self._tokens))
        return replace(whole, prompt_ids=whole.prompt_ids + done, params=params)

    def take(self, slots: Sequence[Slot], completions: Sequence[Completion]) -> list[OpenGroup]:
        """Add what was drawn in a round; the groups that are complete by it, which are open no more."""
        for (group, i), more in zip(slots, completions, strict=True):
            group.add(i, more)
        complete = [group for group in self.groups if not group.unfinished]
        self.groups = [group for group in self.groups if group.unfinished]
        return complete


def joined(so_far: Completion, more: Completion) -> Completion:
    """A response and what continues it.

    The experts of a token are those of the stretch that it was computed in first.
    """
    length, experts = len(so_far.response_ids), more.routed_experts
    if experts is not None and so_far.routed_experts is not None:
        experts = np.concatenate([so_far.routed_experts, experts[len(so_far.routed_experts) :]])
    return replace(
        more,
        response_ids=so_far.response_ids + more.response_ids,
        rollout_log_probs=so_far.rollout_log_probs + more.rollout_log_probs,
        num_cached_tokens=so_far.num_cached_tokens + more.num_cached_tokens,
        routed_experts=None if so_far.routed_experts is None else experts,
        spans=_joined_spans(so_far.spans, more.spans, length),
    )


def _joined_spans(
    so_far: tuple[Span, ...], more: tuple[Span, ...], length: int
) -> tuple[Span, ...]:
    shifted = [replace(s, start=s.start + length, end=s.end + length) for s in more]
    if so_far and shifted and so_far[-1].version == shifted[0].version:
        shifted[0] = replace(shifted[0], start=so_far[-1].start)
        so_far = so_far[:-1]
    return (*so_far, *shifted)
