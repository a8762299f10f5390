"""Processor time of the process that holds the loop, for each token of long samples.

    python -m benchmarks.controller_time OUT.json

A server in a process of its own answers as the plug-in does, with made-up tokens. This process asks it
as a run does, and then does what a run does with the samples, up to the bytes for two ranks; the last
row is a rank's. Times are medians of REPEATS, in microseconds of processor time.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.scale_load import serving, write_answers

SAMPLES, PROMPT, RESPONSE, RANKS = 64, 64, 8192, 2
TURNS, OF_TURN = 256, 64
PACKED = (1_024, 4_096, 16_384)
REPEATS = 7


def sampled(url: str) -> list[Any]:
    """Return the trajectories of SAMPLES requests."""
    import aiohttp

    from onpolicy.rollout.client import EngineClient
    from onpolicy.trajectory import Trajectory
    from onpolicy.types import Request, SamplingParams

    params = SamplingParams(temperature=1.0, max_new_tokens=RESPONSE, stop_token_ids=())
    requests = [
        Request(prompt_ids=[*range(PROMPT)], sampling_seed=i, params=params) for i in range(SAMPLES)
    ]

    found: list[Any] = []

    async def ask() -> None:
        client = EngineClient(url, "", 100.0, 100.0)
        async with aiohttp.ClientSession() as session:
            answers = await asyncio.gather(*(client.generate(session, r) for r in requests))
        pairs = zip(requests, answers, strict=True)
        found.extend(Trajectory.begin(r.prompt_ids).plus(a, params.temperature) for r, a in pairs)

    asyncio.run(ask())
    return found


def turns(completion: Any) -> list[tuple[float, float]]:
    """Return the seconds that each turn of an episode of TURNS * 2 * OF_TURN tokens takes to grow, and
    to ask, which sends all tokens."""
    from onpolicy.rollout.client import _payload
    from onpolicy.trajectory import Trajectory
    from onpolicy.types import Request, SamplingParams

    params = SamplingParams(temperature=1.0, max_new_tokens=OF_TURN, stop_token_ids=())
    so_far, seconds = Trajectory.begin(range(PROMPT)), []
    for _ in range(TURNS):
        before = time.process_time()
        so_far = so_far.given(range(OF_TURN)).plus(completion, 1.0)
        grown = time.process_time()
        json.dumps(_payload(Request(prompt_ids=so_far.token_ids, sampling_seed=0, params=params)))
        seconds.append((grown - before, time.process_time() - grown))
    return seconds


def timed(work: Callable[[], Any]) -> float:
    """Return the median processor time of some work in microseconds."""
    seconds = []
    for _ in range(REPEATS):
        before = time.process_time()
        work()
        seconds.append(time.process_time() - before)
    return median(seconds) * 1e6


def measure(url: str) -> dict[str, Any]:
    from ray.cloudpickle import dumps, loads

    from onpolicy.outputs.totals import RunHash
    from onpolicy.training.shares import Outcomes, make_shares, pack
    from onpolicy.trajectory import Completion, FinishReason
    from onpolicy.types import Prompt, Sample, SampleGroup

    trajectories = sampled(url)
    prompt = Prompt(index=0, prompt_ids=[*range(PROMPT)], label="", text="")
    samples = [
        Sample(prompt=prompt, sample_index=i, trajectory=t, episode=i)
        for i, t in enumerate(trajectories)
    ]
    groups = [SampleGroup(prompt=prompt, samples=samples)]
    count = sum(t.num_sampled for t in trajectories)

    def sent() -> list[bytes]:
        shares = make_shares(samples, 1, RANKS, 4 * (PROMPT + RESPONSE))
        return [dumps((share, Outcomes.of(samples, 1))) for share in shares]

    shares = sent()
    completion = Completion(
        response_ids=[*range(OF_TURN)],
        rollout_log_probs=[-0.5] * OF_TURN,
        finish_reason=FinishReason.STOP,
        weight_version=0,
        num_cached_tokens=0,
    )
    episodes = [turns(completion) for _ in range(REPEATS)]

    def of_turns(part: int, which: slice) -> float:
        return median(turn[part] for each in episodes for turn in each[which]) * 1e6

    first, last = slice(TURNS // 8), slice(-TURNS // 8, None)
    rng = random.Random(0)
    lens = [min(int(rng.expovariate(1 / 8_192)) + 64, 32_768) for _ in range(PACKED[-1])]
    return {
        "us_a_token": {
            "from the socket to the trajectory": timed(lambda: sampled(url)) / count,
            "into the run hash": timed(lambda: RunHash().add_step(groups, 0.0, "")) / count,
            "to the bytes for the ranks": timed(sent) / count,
            "from the bytes, in the ranks": timed(lambda: [*map(loads, shares)]) / count,
        },
        "bytes_a_token_sent": sum(map(len, shares)) / count,
        "us_a_turn": {
            "to grow": {"first eighth": of_turns(0, first), "last eighth": of_turns(0, last)},
            "to ask": {"first eighth": of_turns(1, first), "last eighth": of_turns(1, last)},
        },
        "ms_to_pack": {n: timed(partial(pack, lens[:n], 256, 32_768)) / 1e3 for n in PACKED},
    }


def main() -> None:
    (out,) = sys.argv[1:]
    with TemporaryDirectory() as directory:
        file = Path(directory) / "answers.json"
        write_answers(file, RESPONSE)
        with serving(file, 1, 0.0, 0.0) as (url,):
            found = measure(url)
    print(json.dumps(found, indent=2))
    Path(out).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
