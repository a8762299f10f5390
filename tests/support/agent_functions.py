"""Functions of episodes, as users write them, good and bad; worker processes load them from here."""

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from dataclasses import replace

from onpolicy.agents.tools.calculator import Calculator
from onpolicy.rollout.rollouter import Episode
from onpolicy.rollout.turns import ContextExceededError


async def two_turns(turns, prompt):
    first = await turns.sample(max_tokens=3)
    observation = await Calculator().run(f"{prompt.index} + {len(first.token_ids)}")
    turns.append([int(observation.text) % 10 + 2])
    fork = turns.fork(key="other")
    answers = await asyncio.gather(turns.sample(max_tokens=2), fork.sample(max_tokens=2))
    info = {"tokens": [answer.token_ids for answer in answers], "left": turns.num_left}
    return Episode(trajectories=[fork, turns], rewards=[0.25, 1.5], metrics={"own": 2.0}, info=info)


async def forks(turns, prompt):
    await turns.sample(max_tokens=4)
    turns.append([9, 3])
    fork = turns.fork()
    await asyncio.gather(turns.sample(), fork.sample())
    return Episode()


async def observes(turns, prompt):
    async def clock():
        return {"now": [time.time_ns(), None, "ü"]}

    async def broken():
        raise KeyError("no clock")

    await turns.sample()
    value = await turns.observe(clock)
    try:
        await turns.observe(broken)
    except KeyError as error:
        return Episode(info={"value": value, "error": str(error)})


async def mistakes(turns, prompt):
    told = []
    for mistake in (
        lambda: turns.append([1] * 10_000),
        lambda: turns.append("no tokenizer"),
        lambda: turns.fork(99),
        lambda: turns.fork(key="a") and turns.fork(key="a"),
    ):
        try:
            mistake()
        except ValueError as error:
            told.append(f"{type(error).__name__}: {error}")
    try:
        await turns.sample(max_tokens=0)
    except ValueError as error:
        told.append(str(error))
    assert issubclass(ContextExceededError, ValueError)
    await turns.sample()
    return Episode(info={"told": told})


async def exceeds(turns, prompt):
    """Gives more than fits, and does not mind the error."""
    turns.append([1] * 10_000)


async def asks_for_much(turns, prompt):
    """Gives up an answer that takes too long, and samples another."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(turns.sample(), 0.01)
    await turns.sample()
    return Episode()


async def by_prompt(turns, prompt):
    """Does what the prompt's label says."""
    await turns.sample(max_tokens=1)
    match prompt.label:
        case "raise":
            raise RuntimeError("a bad day")
        case "exit":
            raise SystemExit(3)
        case "cancel":
            raise asyncio.CancelledError
        case "nonsense":
            return {"reward": 1}
        case "branches":
            return [turns.fork(), turns][1:]
        case "no JSON":
            return Episode(info={"object": object()})
        case "hang":
            while True:
                time.sleep(0.05)
        case "hold":
            ctypes.PyDLL(None).sleep(3600)  # which keeps all other threads from going on
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "wait":
            await asyncio.sleep(3600)
        case "stay":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)
        case "forge":
            trajectory = turns.trajectory
            forged = trajectory.rollout_log_probs + [-1.0]
            return Episode(trajectories=[replace(trajectory, rollout_log_probs=forged)])
        case "orphan":
            process = await asyncio.create_subprocess_exec("sleep", "3600")
            return Episode(info={"pid": process.pid, "worker": os.getpid()})
    return Episode(info={"worker": os.getpid()})


async def with_arguments(turns, prompt, *, greeting):
    await turns.sample()
    return Episode(info={"greeting": greeting})


def not_async(turns, prompt):
    return None
