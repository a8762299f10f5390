"""Groups of episodes that are drawn: in rounds, or freely, in the order in which they are complete.

The order of rounds depends on no arrival. A round advances a constant number of episodes,
each by a limited number of sampled tokens: one that is not complete goes on in the next round, under the
weights that the engines hold by then. What the order of arrivals decides in free drawing ends here:
`FreeGroups.batch` says which groups a step gets.
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
    """Position in the endless order of prompts."""

    prompt: Prompt

    episodes: list[OpenEpisode]

    has_greedy: bool = False
    """Whether the last of them is the greedy one."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Step s trains the policy of version s on `batch` groups. None may be trained on more than `most`
    versions after it began."""

    most: int
    batch: int

    def num_late(self, began: Mapping[int, int], step: int) -> int:
        """How many groups that began under versions (version: how many) have no place
        in time if `step` is the first to train on any: 0 if all can be."""
        late = due = 0
        for version in sorted(began):
            due += began[version]
            steps = max(version + self.most - step + 1, 0)
            late = max(late, due - steps * self.batch)
        return late


class FreeGroups(OpenGroups):
    """`groups`: begun and not trained on; first those that are complete, in that order.

    `width`: episodes that are under way at a time, whether they sample or wait for something else.
    `last`: groups of a whole run. The rule of staleness: a group begins only when all that have begun
    can be trained on in time, and a step takes the groups that were complete first, as long as those it
    leaves can; else it waits. So nothing is dropped, and no step has to wait for what may not begin.
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
        """Those that groups began under, by their numbers. They stay while a version is drawn under: a
        group whose first tokens are given up meanwhile is due when it was."""

    def begin(self, version: int) -> list[OpenEpisode]:
        """What is drawn first under new weights, which nothing is drawn under yet."""
        self._version = self._step = version
        unfinished = {group.number: group.unfinished for group in self.groups}  # some end meanwhile
        self.groups.sort(key=lambda group: bool(unfinished[group.number]))
        self._num_complete = sum(not left for left in unfinished.values())
        self._waiting = deque(each for group in self.groups for each in unfinished[group.number])
        self._versions = {group.number: self._version_of(group) for group in self.groups}
        self._drawn.clear()
        return self._next_episodes()

    def _version_of(self, group: OpenGroup) -> int:
        """That of its oldest token, or the present one."""
        branches = [branch for episode in group.episodes for branch in episode.record()]
        spans = [branch.trajectory.spans[0] for branch in branches if branch.trajectory.spans]
        return min((span.version for span in spans), default=self._version)

    def end(self, episode: OpenEpisode) -> list[OpenEpisode]:
        """One is complete: what is drawn in its place.

        Nothing if it is not being drawn: it was complete when this version began.
        """
        if episode not in self._drawn:
            return []
        self._drawn.remove(episode)
        place = next(n for n, group in enumerate(self.groups) if episode in group.episodes)
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
        """The groups of this version's step, in the order in which they were complete; None until there
        are enough of them. They are open no more."""
        size, left = self._staleness.batch, Counter(self._versions.values())
        chosen: list[OpenGroup] = []
        for group in self.groups[: self._num_complete]:
            version = self._versions[group.number]
            left[version] -= 1
            if self._staleness.num_late(left, self._step + 1) < size - len(chosen):
                chosen.append(group)
            else:  # one that would be late is to come
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
