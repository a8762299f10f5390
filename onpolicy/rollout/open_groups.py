"""Groups of episodes being sampled: in rounds, or freely, in the order in which they are complete.

The order of rounds depends on no arrival. A round advances a constant number of episodes, each by a
limited number of sampled tokens: one that is not complete goes on in the next round, under the
weights that the engines hold by then. In free sampling the order of arrivals matters only for the
choice in `FreeGroups.batch` of the groups of a step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.types import Prompt


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """A prompt, and the attempts at it so far."""

    number: int
    """The prompt's position in the endless order of prompts."""

    prompt: Prompt

    episodes: list[OpenEpisode]

    has_greedy: bool = False
    """Whether the last episode is the greedy one."""

    @property
    def unfinished(self) -> list[OpenEpisode]:
        """The episodes that are not complete."""
        return [episode for episode in self.episodes if not episode.is_complete]


class OpenGroups:
    """The groups that are not complete, by their numbers.

    `open_group`: makes the group of a number. `width`: episodes in a round.
    """

    def __init__(self, open_group: Callable[[int], OpenGroup], width: int):
        self._open_group, self._width = open_group, width
        self.next_number, self.groups = 0, list[OpenGroup]()

    def next_round(self) -> list[OpenEpisode]:
        """Return the first episodes that are not complete; groups are opened until there are
        enough."""
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
        """Remove and return the groups that are complete."""
        complete = [group for group in self.groups if not group.unfinished]
        self.groups = [group for group in self.groups if group.unfinished]
        return complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """The staleness rule: step s trains the policy of version s on `batch` groups, none of which
    may have begun more than `most` versions before."""

    most: int
    batch: int

    def num_late(self, began: Mapping[int, int], step: int) -> int:
        """Return how many of the groups that began under versions (version: count) would be trained
        on too late if `step` is the first to train on any: 0 if none would be."""
        late = due = 0
        for version in sorted(began):
            due += began[version]
            # Groups due by step version + most, less the room of the steps until then.
            steps = max(version + self.most - step + 1, 0)
            late = max(late, due - steps * self.batch)
        return late


class FreeGroups(OpenGroups):
    """Groups that have begun and were not trained on; the complete ones first, in order of
    completion.

    `width`: episodes under way at a time, whether they sample or wait for something else. `last`:
    groups of a whole run. Staleness: a group begins only when all that have begun can be trained on
    in time, and a step takes the groups that were complete first, as long as those it leaves can
    be; else it waits. So no group is dropped, and no step has to wait for a group that may not
    begin.
    """

    def __init__(
        self,
        open_group: Callable[[int], OpenGroup],
        width: int,
        staleness: Staleness,
        last: int,
    ):
        super().__init__(open_group, width)
        self._staleness, self._last = staleness, last
        self._version = self._step = self._num_complete = 0
        self._waiting, self._drawn = deque[OpenEpisode](), set[OpenEpisode]()
        self._versions = dict[int, int]()
        """The versions under which groups began, by their numbers. They stay fixed while one
        version samples: a group whose first tokens are discarded meanwhile keeps its due date."""

    def begin(self, version: int) -> list[OpenEpisode]:
        """Return the episodes to sample first under new weights, before anything is sampled under
        them."""
        self._version = self._step = version
        unfinished = {group.number: group.unfinished for group in self.groups}  # some end meanwhile
        self.groups.sort(key=lambda group: bool(unfinished[group.number]))
        self._num_complete = sum(not left for left in unfinished.values())
        self._waiting = deque(each for group in self.groups for each in unfinished[group.number])
        self._versions = {group.number: self._version_of(group) for group in self.groups}
        self._drawn.clear()
        return self._next_episodes()

    def _version_of(self, group: OpenGroup) -> int:
        """Return the version of a group's oldest token, or the present one."""
        branches = [branch for episode in group.episodes for branch in episode.record()]
        spans = [branch.trajectory.spans[0] for branch in branches if branch.trajectory.spans]
        return min((span.version for span in spans), default=self._version)

    def end(self, episode: OpenEpisode) -> list[OpenEpisode]:
        """Return the episodes that start in place of one that is complete.

        Return none if it is not being sampled: it was complete when this version began.
        """
        if episode not in self._drawn:
            return []
        self._drawn.remove(episode)
        place = next(n for n, group in enumerate(self.groups) if episode in group.episodes)
        # Keep the complete groups first, in the order of completion.
        if not self.groups[place].unfinished:
            self.groups.insert(self._num_complete, self.groups.pop(place))
            self._num_complete += 1
        return self._next_episodes()

    def _next_episodes(self) -> list[OpenEpisode]:
        episodes: list[OpenEpisode] = []
        while len(self._drawn) < self._width and (self._waiting or self._begin_group()):
            episodes.append(self._waiting.popleft())
            self._drawn.add(episodes[-1])
        return episodes

    def _begin_group(self) -> bool:
        began = Counter([*self._versions.values(), self._version])
        if self.next_number >= self._last or self._staleness.num_late(began, self._step):
            return False
        group = self._open_next()
        self._versions[group.number] = self._version
        self._waiting += group.unfinished
        return True

    def batch(self) -> list[OpenGroup] | None:
        """Remove and return the groups of this version's step, in the order in which they were
        complete; return None until there are enough of them."""
        size, left = self._staleness.batch, Counter(self._versions.values())
        chosen: list[OpenGroup] = []
        for group in self.groups[: self._num_complete]:
            version = self._versions[group.number]
            left[version] -= 1
            # Take the group only if the ones left can be trained on in time, some of them still in
            # this step.
            if self._staleness.num_late(left, self._step + 1) < size - len(chosen):
                chosen.append(group)
            else:  # a group that would be late is still to come
                left[version] += 1
            if len(chosen) == size:
                return self._take(chosen)
        return None

    def _take(self, chosen: list[OpenGroup]) -> list[OpenGroup]:
        for group in chosen:
            del self._versions[group.number]
        self.groups = [group for group in self.groups if group.number in self._versions]
        self._num_complete -= len(chosen)
        self._step += 1
        return chosen
