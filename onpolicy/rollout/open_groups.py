"""Groups of episodes being sampled, and the order in which steps take them in free sampling.

A group is the list of the attempts at one prompt.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from onpolicy.rollout.open_episode import OpenEpisode


def unfinished(group: Sequence[OpenEpisode]) -> list[OpenEpisode]:
    """Return the episodes of a group that are not complete."""
    return [episode for episode in group if not episode.is_complete]


class OpenGroups:
    """The groups being sampled, by their numbers: the positions of their prompts in the endless order
    of prompts. `open_group`: makes the group of a number."""

    def __init__(self, open_group: Callable[[int], list[OpenEpisode]]):
        self._open_group = open_group
        self.next_number, self.groups = 0, dict[int, list[OpenEpisode]]()

    def open_next(self) -> list[OpenEpisode]:
        """Open and return the group that is next in the order of prompts."""
        group = self.groups[self.next_number] = self._open_group(self.next_number)
        self.next_number += 1
        return group

    def take_all(self) -> list[list[OpenEpisode]]:
        """Remove and return all groups."""
        groups, self.groups = self.groups, {}
        return [*groups.values()]


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
    """Groups that have begun and were not trained on; the complete ones in order of completion.

    `width`: episodes under way at a time, whether they sample or wait for something else. `last`:
    groups of a whole run. Staleness: a group begins only when all that have begun can be trained on
    in time, and a step takes the groups that were complete first, as long as those it leaves can
    be; else it waits. So no group is dropped, and no step waits for one that may not begin.
    """

    def __init__(
        self,
        open_group: Callable[[int], list[OpenEpisode]],
        width: int,
        staleness: Staleness,
        last: int,
    ):
        super().__init__(open_group)
        self._width, self._staleness, self._last = width, staleness, last
        self._version = self._step = 0
        self._complete = dict[int, None]()
        """The numbers of complete groups, in the order of completion."""
        self._is_news = False
        """Whether there may be a batch: further groups that begin bring none."""
        self._waiting, self._drawn = deque[OpenEpisode](), set[OpenEpisode]()
        self._versions = dict[int, int]()
        """The versions under which groups began, by their numbers. They stay fixed while one
        version samples: a group whose first tokens are discarded meanwhile keeps its due date."""

    def begin(self, version: int) -> list[OpenEpisode]:
        """Return the episodes to sample first under new weights."""
        self._version = self._step = version
        self._is_news = True
        left = {number: unfinished(group) for number, group in self.groups.items()}
        for number in left:
            if not left[number] and number not in self._complete:  # some end meanwhile
                self._put_last(number)
        self._waiting = deque(episode for episodes in left.values() for episode in episodes)
        self._versions = {number: self._version_of(self.groups[number]) for number in left}
        self._drawn.clear()
        return self._next_episodes()

    def _version_of(self, group: Sequence[OpenEpisode]) -> int:
        """Return the version of a group's oldest token, or the present one."""
        branches = [branch for episode in group for branch in episode.record()]
        spans = [branch.spans[0] for branch in branches if branch.spans]
        return min((span.version for span in spans), default=self._version)

    def end(self, episode: OpenEpisode) -> list[OpenEpisode]:
        """Return the episodes that start in place of one that has ended, if this version ran it."""
        if episode not in self._drawn:
            return []
        self._drawn.remove(episode)
        if not unfinished(self.groups[episode.number]):
            self._put_last(episode.number)
        return self._next_episodes()

    def _put_last(self, number: int) -> None:
        """Put a group that is complete after all others, an order which a checkpoint keeps."""
        self._complete[number], self._is_news = None, True
        self.groups[number] = self.groups.pop(number)

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
        self._versions[self.next_number] = self._version
        self._waiting += unfinished(self.open_next())
        return True

    def batch(self) -> list[list[OpenEpisode]] | None:
        """Remove and return the groups of this version's step, in the order in which they were
        complete; return None until there are enough of them."""
        size = self._staleness.batch
        if not self._is_news or len(self._complete) < size:
            return None
        left = Counter(self._versions.values())
        chosen: list[int] = []
        for number in self._complete:
            version = self._versions[number]
            left[version] -= 1
            # Take the group only if the ones left can be trained on in time, some of them still in
            # this step.
            if self._staleness.num_late(left, self._step + 1) < size - len(chosen):
                chosen.append(number)
            else:  # a group that would be late is still to come
                left[version] += 1
            if len(chosen) == size:
                return self._take(chosen)
        self._is_news = False
        return None

    def _take(self, chosen: Sequence[int]) -> list[list[OpenEpisode]]:
        for number in chosen:
            del self._versions[number]
            del self._complete[number]
        self._step += 1
        return [self.groups.pop(number) for number in chosen]
