"""Groups of episodes that are drawn in rounds, in an order that depends on no arrival.

A round advances a constant number of episodes, each by a limited number of sampled tokens: one that is
not complete goes on in the next round, under the weights that the engines hold by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onpolicy.rollout.episodes import OpenEpisode
from onpolicy.types import Prompt


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """A prompt, and the attempts at it so far."""

    number: int
    """Position in the endless order of prompts."""

    prompt: Prompt

    episodes: list[OpenEpisode]

    @property
    def unfinished(self) -> list[OpenEpisode]:
        """Those that are not complete."""
        return [episode for episode in self.episodes if not episode.is_complete]


class OpenGroups:
    """The groups that are not complete, by their numbers.

    `open_group`: makes the group of a number. `width`: episodes in a round.
    """

    def __init__(self, open_group: Callable[[int], OpenGroup], width: int):
        self._open_group, self._width = open_group, width
        self.next_number, self.groups = 0, list[OpenGroup]()

    def next_round(self) -> list[OpenEpisode]:
        """The first episodes that are not complete; groups are opened until there are enough."""
        episodes = [episode for group in self.groups for episode in group.unfinished]
        while len(episodes) < self._width:
            episodes += self._open_next().unfinished
        return episodes[: self._width]

    def _open_next(self) -> OpenGroup:
        group = self._open_group(self.next_number)
        self.next_number += 1
        self.groups.append(group)
        return group

    def take_complete(self) -> list[OpenGroup]:
        """The groups that are complete, which are open no more."""
        complete = [group for group in self.groups if not group.unfinished]
        self.groups = [group for group in self.groups if group.unfinished]
        return complete
