"""Has an engine give up what it samples, where a job is not to be done to its end."""

from __future__ import annotations

import asyncio

import aiohttp

from onpolicy.rollout.base import SamplingJob
from onpolicy.rollout.client import EngineClient

_PAUSE = 0.02
"""Seconds between two looks at whether a job is interrupted."""


async def interrupt(job: SamplingJob, client: EngineClient, session: aiohttp.ClientSession) -> None:
    """Once the job is interrupted, have the engine answer with what it has, until that has arrived.

    More than once: a request may be on its way to the engine meanwhile.
    """
    while True:
        if job.is_interrupted:
            await client.abort(session)
        await asyncio.sleep(_PAUSE)
