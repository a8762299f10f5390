"""An agent that tests of whole runs name: two turns, a tool that takes its time, and a fork."""

import asyncio
import random


async def act(turns, prompt):
    answer = await turns.sample(stop=["b"], max_tokens=12)
    is_over = "b" in answer.text or len(answer.token_ids) == 12 or answer.finish_reason == "stop"
    assert is_over and "b" not in answer.text[:-1]
    await asyncio.sleep(random.random() * 0.02)
    seen = await turns.observe(look)
    turns.append(f" {seen} ")
    fork = turns.fork()
    await asyncio.gather(turns.sample(max_tokens=4, temperature=0.8), fork.sample(max_tokens=6))


async def look():
    return random.randrange(10**6)
