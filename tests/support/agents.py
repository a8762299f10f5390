"""Functions that roll prompts out, good and bad; named by their paths in tests of runs."""

import asyncio
import itertools
import random
from collections import defaultdict
from contextvars import ContextVar

from onpolicy.rollout.open_episode import Stopwatch
from onpolicy.rollout.rollouter import Episode

GIVEN = [9, 3]

chance, calls = random.Random(), itertools.count()

_watch = ContextVar("watch")


class ToldWatch(Stopwatch):
    """Shows the seconds that its episode says it takes, so that no busy machine decides who is late."""

    def __init__(self):
        super().__init__()
        self.told = 0.0
        _watch.set(self)

    @property
    def seconds(self):
        return self.told


async def takes_long():
    _watch.get().told = 1e9
    await asyncio.Event().wait()


async def acts(turns, prompt):
    """Two turns and a fork, tools that take their time, and an observation that no two calls share."""
    await turns.sample(max_tokens=4)
    await asyncio.sleep(chance.random() * 0.003)
    observed = await turns.observe(look)
    turns.append([*GIVEN, 2 + observed % 8])
    fork = turns.fork()
    await asyncio.gather(turns.sample(max_tokens=3), after_a_tool(fork))


async def after_a_tool(turns):
    await asyncio.sleep(chance.random() * 0.003)
    await turns.sample(temperature=1.5)


async def look():
    await asyncio.sleep(chance.random() * 0.003)
    return next(calls)


async def acts_by_tokens(turns, prompt):
    """As `acts`, but what it gives is a function of what was sampled."""
    answer = await turns.sample(max_tokens=4)
    await asyncio.sleep(chance.random() * 0.003)
    turns.append([*GIVEN, 2 + sum(answer.token_ids) % 8])
    fork = turns.fork()
    await asyncio.gather(turns.sample(max_tokens=3), after_a_tool(fork))


async def raises(turns, prompt):
    await turns.sample()
    if prompt.index % 2:
        raise KeyError("no such tool")


async def never_ends(turns, prompt):
    await turns.sample()
    if prompt.index % 2:
        await takes_long()


async def exceeds(turns, prompt):
    await turns.sample()
    if prompt.index % 2:
        turns.append([9] * 100)


async def samples_nothing(turns, prompt):
    turns.append([9])


async def returns_text(turns, prompt):
    await turns.sample()
    return "done"


async def takes_one(turns):
    await turns.sample()


def is_no_coroutine(turns, prompt):
    return None


async def acts_or_takes_long(turns, prompt):
    """As `acts`, but of each prompt's calls that get to their end every third is held up, if
    `is_held_up`: one of any group's, in whatever order they come."""
    await acts(turns, prompt)
    if is_held_up and next(ends[prompt.index]) % 3 == 0:
        await takes_long()


hears, is_held_up, ends = str, True, defaultdict(itertools.count)


async def forks_by(turns, prompt):
    """Forks under a key that is not what it was when a test says so."""
    await turns.sample(max_tokens=3)
    turns.append(GIVEN)
    await turns.fork(key=hears(prompt.index)).sample()


async def weighs(turns, prompt):
    """Learns from every other token, and has the others keep their entropy."""
    await turns.sample()
    others = [i % 2 for i in range(turns.trajectory.num_sampled)]
    return Episode(token_weights={"objective": [others], "entropy": [[1 - x for x in others]]})
