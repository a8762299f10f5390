"""Which groups a free schedule begins, and which a step gets, without engines."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.open_groups import FreeGroups, Staleness, unfinished
from onpolicy.trajectory import Span
from tests.support.groups import open_group
from tests.support.samples import make_completion


def grown(episode, version, tokens):
    """The episode, with so many tokens more under these weights."""
    spans = (Span(version=version, start=0, end=tokens),) if tokens else ()
    more = make_completion([100] * tokens, [-1.0] * tokens, weight_version=version, spans=spans)
    episode.turns.trajectory = episode.turns.trajectory.plus(more, 1.0)


def ended(groups, episode, version, tokens):
    grown(episode, version, tokens)
    episode.samples = []
    return groups.end(episode)


class Clock:
    """Says which response is answered next, how far it has come, and when the step is over."""

    def __init__(self, groups, chance):
        self.groups, self.chance = groups, chance

    def run(self, steps):
        """The groups of each step, and the order in which all were complete."""
        self.batches, self.complete, self.unfinished = [], [], Counter()
        for version in range(steps):
            self.version, self.drawn = version, self.groups.begin(version)
            self.pass_until_taken()
            for _ in range(self.chance.randrange(8)):  # while the trainer learns
                self.let_one_end()
            for episode in list(self.drawn):  # the push
                grown(episode, version, min(self.chance.randrange(3), episode.turns.num_left - 1))
            self.drawn.clear()
        return self.batches

    def pass_until_taken(self):
        for episode in self.drawn:
            if self.chance.random() < 0.2:  # an attempt that is begun anew has no token any more
                episode._start_over()
        while (batch := self.groups.batch()) is None:
            assert self.drawn, "the step would wait forever"
            self.let_one_end()
        self.batches.append(batch)

    def let_one_end(self):
        if self.drawn:
            episode = self.chance.choice(self.drawn)
            group = self.groups.groups[episode.number]
            self.drawn.remove(episode)
            tokens = self.chance.randrange(1, episode.turns.num_left + 1)
            self.drawn += ended(self.groups, episode, self.version, tokens)
            if not unfinished(group):
                self.complete.append(episode.number)


def places(episodes):
    """(number of the group, place in it) of each."""
    return [(episode.number, episode.index) for episode in episodes]


def number_of(group):
    (number,) = {episode.number for episode in group}
    return number


def oldest(group):
    return min(int(e.turns.trajectory.spans[0].version) for e in group)


runs = st.tuples(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.integers(1, 7), st.randoms()
)


@given(runs)
def test_every_group_is_trained_on_once_whole_and_in_time(run):
    most, size, width, steps, chance = run
    staleness = Staleness(most=most, batch=size)
    groups = FreeGroups(open_group, width, staleness, steps * size)
    clock = Clock(groups, chance)
    batches = clock.run(steps)
    assert [len(batch) for batch in batches] == [size] * steps
    numbers = [number_of(group) for batch in batches for group in batch]
    assert sorted(numbers) == list(range(steps * size)) and not groups.groups
    for step, batch in enumerate(batches):
        assert all(unfinished(group) == [] for group in batch)
        assert all(step - oldest(group) <= most for group in batch)
        order = [clock.complete.index(number_of(group)) for group in batch]
        assert order == sorted(order)


@given(runs)
def test_no_more_responses_are_drawn_at_a_time_than_asked_for(run):
    most, size, width, steps, chance = run
    staleness = Staleness(most=most, batch=size)

    class Counts(FreeGroups):
        def _next_episodes(self):
            episodes = super()._next_episodes()
            assert len(self._drawn) <= width
            return episodes

    Clock(Counts(open_group, width, staleness, steps * size), chance).run(steps)


@pytest.fixture
def asked(monkeypatch):
    """The questions that were asked of the rule."""
    questions, rule = [], Staleness.num_late
    monkeypatch.setattr(
        Staleness, "num_late", lambda *given: questions.append(given) or rule(*given)
    )
    return questions


def test_the_rule_is_not_asked_about_a_batch_that_is_not_there(asked):
    groups = FreeGroups(open_group, 64, Staleness(most=2, batch=5), 10)
    drawn, found = groups.begin(0), []
    while not found:
        ended(groups, drawn.pop(0), 0, 1)
        asked.clear()
        found = groups.batch() or []
        assert len(asked) == len(found)
    assert len(found) == 5


def test_the_rule_is_asked_again_only_when_another_group_is_complete(asked):
    """Two groups are due, and the complete ones have to wait for them."""
    groups = FreeGroups(open_group, 64, Staleness(most=1, batch=2), 20)
    drawn = groups.begin(0)
    late = drawn[:4]
    for episode in drawn[4:]:
        ended(groups, episode, 0, 1)
    assert groups.batch() is not None
    for episode in late:
        grown(episode, 0, 1)
    for episode in groups.begin(1):
        if episode not in late:
            ended(groups, episode, 1, 1)
    assert groups.batch() is None and len(groups._complete) >= 2
    for episode, is_whole in zip(late, (False, True, False, True), strict=True):
        ended(groups, episode, 1, 1)
        asked.clear()
        batch = groups.batch()
        assert bool(asked) == is_whole
    assert batch is not None


def test_an_episode_that_was_complete_when_a_version_began_counts_once():
    groups = FreeGroups(open_group, 2, Staleness(most=3, batch=1), 10)
    first = groups.begin(0)[0]
    group = groups.groups[first.number]
    for episode in group:
        grown(episode, 0, 1)
        episode.samples = []
    groups.begin(1)
    assert [groups.end(episode) for episode in group] == [[] for _ in group]
    assert groups.batch() == [group]
    assert groups.batch() is None


@pytest.mark.parametrize("looks", range(5))
def test_an_episode_that_ends_while_a_version_begins_is_counted(monkeypatch, looks):
    """After so many looks at whether it is complete."""
    groups = FreeGroups(open_group, 4, Staleness(most=3, batch=1), 10)
    drawn = groups.begin(0)
    group, last = groups.groups[0], groups.groups[0][-1]
    for episode in drawn:
        grown(episode, 0, 1)
        if episode is not last:
            episode.samples = []
    seen, is_complete = iter(range(99)), OpenEpisode.is_complete

    def ends_meanwhile(episode):
        if episode is last and next(seen) == looks:
            last.samples = []
        return is_complete.fget(episode)

    with monkeypatch.context() as patch:
        patch.setattr(OpenEpisode, "is_complete", property(ends_meanwhile))
        groups.begin(1)
    last.samples = []
    groups.end(last)
    found = [groups.batch(), groups.batch()]
    assert group in [batch[0] for batch in found if batch]


def in_time(began, step, staleness):
    """Whether some order of training, one batch a step, is in time for all: the oldest first."""
    versions = sorted(Counter(began).elements())
    return all(step + i // staleness.batch <= v + staleness.most for i, v in enumerate(versions))


def test_groups_are_late_if_no_order_of_training_is_in_time():
    staleness = Staleness(most=2, batch=2)
    for counts in product(range(5), repeat=3):
        began = dict(enumerate(counts))
        for step in range(2, 5):
            assert (staleness.num_late(began, step) == 0) == in_time(began, step, staleness)


def test_what_is_complete_first_is_trained_on_first_unless_another_would_be_late():
    groups = FreeGroups(open_group, 8, Staleness(most=1, batch=1), 9)
    drawn = groups.begin(0)
    assert places(drawn) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for episode in drawn[2:]:
        ended(groups, episode, 0, 3)
    assert [number_of(group) for group in groups.batch()] == [1]
    for episode in drawn[:2]:
        grown(episode, 0, 2)
    drawn = groups.begin(1)
    assert places(drawn) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    for episode in drawn[2:]:
        ended(groups, episode, 1, 3)
    assert groups.batch() is None  # 0 began under version 0, and is to be trained on now
    for episode in drawn[:2]:
        ended(groups, episode, 1, 1)
    (batch,) = groups.batch()
    assert number_of(batch) == 0
    assert [(span.version, span.end) for span in batch[0].turns.trajectory.spans] == [
        (0, 2),
        (1, 3),
    ]
