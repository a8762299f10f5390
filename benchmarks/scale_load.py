"""Load test of the rollout's client and dispatch: made-up engines hold a whole step's requests at once.

    python -m benchmarks.scale_load OUT.json

A process of its own answers on ENGINES ports as the plug-in does, from a file of made-up tokens, each
answer after the time that its length takes. This process samples a step with what a run samples with,
compares every answer with the file, and makes the bytes for the ranks. scale.md has the protocol.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

ENGINES, GROUPS, SAMPLES, PROMPT = 64, 1024, 16, 512
VOCABULARY = 151_936
MEDIAN, LONGEST, SPREAD = 6144, 32_768, 1.0
"""Tokens of a response: a log-normal's median, its cut, and the standard deviation of the logarithm."""

STEP_SECONDS = 200.0
FIRST, LAST = 20.0, 180.0
"""Seconds until an answer of no tokens, and of the longest."""

MARKED = 3
"""Tokens at the beginning of an answer that are its request's seed: 16 characters of base64."""


def lengths(count: int, longest: int = LONGEST) -> list[int]:
    """Return lengths of responses, each a multiple of MARKED."""
    chance = random.Random(0)
    median = MEDIAN * longest / LONGEST
    drawn = (median * math.exp(SPREAD * chance.gauss(0, 1)) for _ in range(count))
    return [max(MARKED, int(min(longest, each)) // MARKED * MARKED) for each in drawn]


def write_answers(file: Path, longest: int) -> None:
    """Write the answer of the longest response, with made-up tokens, as the plug-in packs it."""
    from sglang_patches.generate_each import _packed

    chance = random.Random(0)
    ids = [chance.randrange(VOCABULARY) for _ in range(longest)]
    meta = {
        "output_token_logprobs": [(-chance.random(), token, None) for token in ids],
        "finish_reason": {"type": "length"},
        "weight_version": 0,
    }
    file.write_text(json.dumps(_packed({"output_ids": ids, "meta_info": meta})))


class Engines:
    """Made-up engines of one process. `loses`: the seeds whose answers are lost."""

    def __init__(self, file: Path, first: float, last: float, loses: Sequence[int]):
        self.answer = json.loads(file.read_text())
        self.longest = len(base64.b64decode(self.answer["output_ids"])) // 4
        self.first, self.last, self.loses = first, last, loses
        self.in_flight = self.most = self.calls = 0

    def answer_to(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the request's seed MARKED times and then the file's tokens, as many as it asks for."""
        params = asked["sampling_params"]
        seed, end = params["sampling_seed"], params["max_new_tokens"] // MARKED * 16
        ids = (
            base64.b64encode(seed.to_bytes(4, "little") * MARKED).decode()
            + self.answer["output_ids"][16:end]
        )
        values = self.answer["meta_info"]["output_token_logprobs"][0][:end]
        meta = {**self.answer["meta_info"], "output_token_logprobs": (values, ids)}
        return {"output_ids": ids, "meta_info": meta}

    async def generate_each(self, request: Any) -> Any:
        """Answer a call's requests, each in its time."""
        import orjson
        from aiohttp import web

        asked = orjson.loads(await request.read())["requests"]
        self.in_flight += len(asked)
        self.most, self.calls = max(self.most, self.in_flight), self.calls + 1
        response = web.StreamResponse()
        await response.prepare(request)
        start = asyncio.get_running_loop().time()
        try:
            sizes = [each["sampling_params"]["max_new_tokens"] for each in asked]
            for place in sorted(range(len(asked)), key=sizes.__getitem__):
                seconds = self.first + (self.last - self.first) * sizes[place] / self.longest
                await asyncio.sleep(start + seconds - asyncio.get_running_loop().time())
                if asked[place]["sampling_params"]["sampling_seed"] not in self.loses:
                    line = orjson.dumps([[place, 200, self.answer_to(asked[place])]])
                    await response.write(line + b"\n")
        finally:
            self.in_flight -= len(asked)
        return response

    async def serve(self, engines: int) -> None:
        """Listen on as many ports, and print them."""
        from aiohttp import web

        async def seen(_: Any) -> Any:
            return web.json_response({"most in flight": self.most, "calls": self.calls})

        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate_each", self.generate_each)
        app.router.add_get("/health", seen)
        runner = web.AppRunner(app)
        await runner.setup()
        for _ in range(engines):
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(json.dumps([address[1] for address in runner.addresses]), flush=True)
        await asyncio.Event().wait()


@contextmanager
def serving(
    file: Path, engines: int, first: float, last: float, *loses: int
) -> Iterator[list[str]]:
    """Serve answers from the file in a process of its own; yield the URLs of its engines."""
    command = [sys.executable, "-m", "benchmarks.scale_load", "--serve", str(file)]
    command += map(str, (engines, first, last, *loses))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ports = json.loads(server.stdout.readline())
            yield [f"http://127.0.0.1:{port}" for port in ports]
        finally:
            server.terminate()


def sampled(urls: Sequence[str], counts: Sequence[int], samples: int, most: int) -> list[Any]:
    """Return the groups of samples of a step, one sample for each count of tokens, through a run's
    episodes, job, dispatch and client."""
    from onpolicy.config.groups import EngineConfig
    from onpolicy.rollout.episode_jobs import EpisodesJob
    from onpolicy.rollout.open_episode import OpenEpisode
    from onpolicy.rollout.rollouter import SingleTurn
    from onpolicy.rollout.sglang import SglangGroup
    from onpolicy.types import Prompt, Request, SampleGroup, SamplingParams

    config = EngineConfig(rollout_server_url=tuple(urls), rollout_max_concurrency=most)
    spec: Any = SimpleNamespace(contract=None, api_key="", admin_api_key="")  # not compared here
    group, rollouter = SglangGroup(config, [spec], Path()), SingleTurn()
    prompts = [
        Prompt(index=i, prompt_ids=[i, *range(1, PROMPT)], label="", text="")
        for i in range(len(counts) // samples)
    ]
    episodes = []
    for seed, count in enumerate(counts):
        prompt = prompts[seed // samples]
        params = SamplingParams(temperature=1.0, max_new_tokens=count, stop_token_ids=())
        request = Request(prompt_ids=prompt.prompt_ids, sampling_seed=seed, params=params)
        episodes.append(OpenEpisode(rollouter, prompt, request, index=seed % samples))
    job = EpisodesJob(0)
    job.begin(episodes)
    group.generate(job)
    found = iter(episodes)
    return [
        SampleGroup(prompt=p, samples=[(next(found).samples or [None])[0] for _ in range(samples)])
        for p in prompts
    ]


def wrong(groups: Sequence[Any], counts: Sequence[int], file: Path) -> list[int]:
    """Return the seeds of the samples that are missing or are not the file's, to the bit."""
    import numpy as np

    answer = json.loads(file.read_text())
    encoded = (answer["output_ids"], answer["meta_info"]["output_token_logprobs"][0])
    ids, values = (np.frombuffer(base64.b64decode(each), "<i4") for each in encoded)
    samples, found = [sample for group in groups for sample in group.samples], []
    for seed, (sample, count) in enumerate(zip(samples, counts, strict=True)):
        expected = np.concatenate([np.full(MARKED, seed, "<i4"), ids[MARKED:count]])
        if (
            sample is None
            or not np.array_equal(sample.trajectory.response_ids.array, expected)
            or sample.trajectory.rollout_log_probs.array.tobytes() != values[:count].tobytes()
        ):
            found.append(seed)
    return found


def sent(groups: Sequence[Any], ranks: int) -> int:
    """Hash a step and make the bytes for the ranks; return their number."""
    from ray.cloudpickle import dumps

    from onpolicy.outputs.totals import RunHash
    from onpolicy.training.shares import Outcomes, make_shares

    RunHash().add_step(groups, 0.0, "")
    samples = [sample for group in groups for sample in group.samples]
    for number, sample in enumerate(samples):
        sample.episode, sample.group = number, number // len(groups[0].samples)
    shares, outcomes = make_shares(samples, 1, ranks, PROMPT + LONGEST), Outcomes.of(samples, 1)
    return sum(len(dumps((share, outcomes))) for share in shares)


def measure(urls: Sequence[str], counts: Sequence[int], samples: int, file: Path) -> dict[str, Any]:
    """Sample a step from the engines; return what was seen. The check is not counted."""
    import requests

    sent(sampled(urls[:1], [MARKED], 1, 1), 1)  # imports
    before, started, memory = time.process_time(), time.monotonic(), getrusage(RUSAGE_SELF)
    groups = sampled(urls, counts, samples, -(-len(counts) // len(urls)))
    sampling, seconds = time.process_time() - before, time.monotonic() - started
    peak = getrusage(RUSAGE_SELF).ru_maxrss * 1024
    before = time.process_time()
    num_bytes = sent(groups, len(urls))
    sending = time.process_time() - before
    return {
        "engines": len(urls),
        "requests": len(counts),
        "tokens": sum(counts),
        "seconds": seconds,
        "wrong": len(wrong(groups, counts, file)),
        "engines saw": requests.get(f"{urls[0]}/health", timeout=60).json(),
        "processor seconds": {"sampling": sampling, "hash and bytes": sending},
        "share of a step": (sampling + sending) / STEP_SECONDS,
        "bytes sent a token": num_bytes / sum(counts),
        "peak bytes a token": (peak - memory.ru_maxrss * 1024) / sum(counts),
        "peak bytes": peak,
    }


def main() -> None:
    name, *given = sys.argv[1:]
    if name == "--serve":
        file, engines, first, last, *loses = given
        made_up = Engines(Path(file), float(first), float(last), [*map(int, loses)])
        asyncio.run(made_up.serve(int(engines)))
        return
    with TemporaryDirectory() as directory:
        file = Path(directory) / "answers.json"
        write_answers(file, LONGEST)
        with serving(file, ENGINES, FIRST, LAST) as urls:
            found = measure(urls, lengths(GROUPS * SAMPLES), SAMPLES, file)
    Path(name).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
