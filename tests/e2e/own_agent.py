"""Agents that tests of whole runs name: two turns, a tool that takes its time, and a fork."""

import asyncio
import random

WORDS = "([a-f]{3,5}-)+[0-9]{2}"


async def act_by_tokens(turns, prompt):
    """What it gives is a function of what was sampled, so that its runs have one hash."""
    await go_on(turns, sum(await first_answer(turns)))


async def first_answer(turns):
    answer = await turns.sample(stop=["b"], max_tokens=12)
    is_over = "b" in answer.text or len(answer.token_ids) == 12 or answer.finish_reason == "stop"
    assert is_over and "b" not in answer.text[:-1]
    await asyncio.sleep(random.random() * 0.02)
    return answer.token_ids


async def go_on(turns, given):
    turns.append(f" {given} ")
    fork = turns.fork()
    await asyncio.gather(turns.sample(max_tokens=4, temperature=0.8), fork.sample(max_tokens=6))


async def act_within(turns, prompt):
    """Two turns within grammars, of which a call cuts the first, and a fork without one."""
    answer = await turns.sample(regex=WORDS, max_tokens=5)
    if not turns.has_stopped:
        answer = await turns.sample(regex=WORDS, max_tokens=9)
    turns.append(f" {sum(answer.token_ids)} ")
    fork = turns.fork()
    within = turns.sample(json_schema={"type": "boolean"}, max_tokens=8, temperature=0.8)
    await asyncio.gather(within, fork.sample(max_tokens=6))


async def write_within(turns, prompt):
    """One long answer within a grammar, which pushes of a free run come into, and a short one after."""
    await turns.sample(regex="([a-f]{3,5}-){16}[0-9]{2}", max_tokens=80)
    turns.append(" so: ")
    await turns.sample(json_schema={"type": "boolean"}, max_tokens=8)
