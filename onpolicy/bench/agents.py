"""`onpolicy bench agents`: episodes of several turns with tools of varying latency.

Latencies are Pareto-distributed, cut at a time limit as tools have one, and are a function of
episode and turn. Each kind of operators is measured in two ways. Free: an episode, in a worker
process, goes on as soon as its tool has answered. Turn by turn: all sample, all tools answer, and
then all sample again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from onpolicy.agents.agent_workers import AgentFunction, WorkerRollouter, default_workers
from onpolicy.bench.requests import random_prompts, random_requests
from onpolicy.bench.rollout import servers
from onpolicy.bench.setting import settings
from onpolicy.bench.turns import take_turns
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.base import RolloutGroup, SamplingJob
from onpolicy.rollout.episode_jobs import EpisodesJob
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.rollouter import Episode, Rollouter, Turns
from onpolicy.trajectory import UNPUSHED, Trajectory
from onpolicy.types import Prompt, Request

SHAPE = 1.2
"""The shape of the Pareto distribution: its mean is finite, its variance is not."""

ANSWERED = 4
"""The divisor of a turn's tokens: a tool's answer is a quarter of them."""

HANG_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool that after each turn of `sampled` tokens takes some seconds, and then gives `answer`."""

    num_turns: int
    sampled: int
    answer: list[int]
    least: float
    most: float

    def seconds(self, episode: int, turn: int) -> float:
        """Return the latency of a call in seconds."""
        drawn = random.Random(f"{episode}/{turn}").paretovariate(SHAPE)
        return min(self.least * drawn, self.most)


def tool_of(config: BenchConfig) -> Tool:
    """Return a tool whose answers take their part of --max-new-tokens."""
    tokens = config.max_new_tokens // config.num_turns
    answered = tokens // ANSWERED
    return Tool(
        num_turns=config.num_turns,
        sampled=tokens - answered,
        answer=[*range(answered)],
        least=config.tool_latency,
        most=config.tool_time_limit,
    )


async def play(turns: Turns, prompt: Prompt, *, tool: Tool) -> Episode:
    """Play an episode, in a worker process."""
    for turn in range(tool.num_turns):
        await turns.sample(max_tokens=tool.sampled)
        await asyncio.sleep(tool.seconds(prompt.index, turn))
        turns.append(tool.answer)
    return Episode()


def bench_agents(config: BenchConfig) -> dict[str, Any]:
    """Return for each kind of operators the seconds of all episodes, free and turn by turn;
    `ratio`, the speedup of the free ones; and whether both sampled the same tokens with the same
    bits."""
    vocab_size, tool = load_config(config.model.hf_checkpoint).vocab_size, tool_of(config)
    prompts, requests = random_prompts(config, vocab_size), random_requests(config, vocab_size)
    work = list(zip(prompts, requests, strict=True))
    function = AgentFunction(path=f"{__name__}.play", arguments={"tool": tool})
    workers = WorkerRollouter(function, default_workers(), HANG_SECONDS)
    with closing(workers), servers(config) as (groups, _):
        measures = dict[str, Callable[[], Measured]]()
        for kind, group in groups.items():
            draw_turn_by_turn(group, work, replace(tool, num_turns=1, most=tool.least))  # warms up
            measures[f"{kind}, free"] = partial(draw_freely, group, work, workers)
            measures[f"{kind}, turn by turn"] = partial(draw_turn_by_turn, group, work, tool)
        runs = take_turns(measures, 0, config.repetitions)
    return {
        "what": "agents",
        "unit": "seconds of all episodes",
        **{kind: compare(runs[f"{kind}, free"], runs[f"{kind}, turn by turn"]) for kind in groups},
        "num_turns": config.num_turns,
        "tool_latency": config.tool_latency,
        "tool_time_limit": config.tool_time_limit,
        "pareto_shape": SHAPE,
        "num_workers": default_workers(),
        **settings(config),
    }


class Measured(NamedTuple):
    """One measurement of all episodes."""

    seconds: float
    trajectories: list[Trajectory]


Work = Sequence[tuple[Prompt, Request]]


def draw_freely(group: RolloutGroup, work: Work, rollouter: Rollouter) -> Measured:
    """Sample episodes that go on as soon as their own tool has answered."""
    _flush(group)
    started = time.perf_counter()
    episodes = [OpenEpisode(rollouter, prompt, request) for prompt, request in work]
    job = EpisodesJob(UNPUSHED)
    job.begin(episodes)
    group.generate(job)
    return Measured(time.perf_counter() - started, [each.trajectories[0] for each in episodes])


def draw_turn_by_turn(group: RolloutGroup, work: Work, tool: Tool) -> Measured:
    """Sample episodes that go on when all tools, which work in parallel, have answered."""
    _flush(group)
    started = time.perf_counter()
    so_far = [Trajectory.begin(prompt.prompt_ids) for prompt, _ in work]
    for turn in range(tool.num_turns):
        requests = [
            replace(
                request,
                prompt_ids=trajectory.token_ids,
                params=replace(request.params, max_new_tokens=tool.sampled),
            )
            for trajectory, (_, request) in zip(so_far, work, strict=True)
        ]
        answers = group.generate(SamplingJob(requests))
        time.sleep(max(tool.seconds(prompt.index, turn) for prompt, _ in work))
        so_far = [
            trajectory.plus(answer, request.params.temperature).given(tool.answer)
            for trajectory, answer, request in zip(so_far, answers, requests, strict=True)
        ]
    return Measured(time.perf_counter() - started, so_far)


def compare(free: Sequence[Measured], in_turns: Sequence[Measured]) -> dict[str, Any]:
    """Return the result of one kind of operators."""
    pairs = list(zip(free, in_turns, strict=True))
    return {
        "free": [one.seconds for one, _ in pairs],
        "turn_by_turn": [other.seconds for _, other in pairs],
        "ratio": median(other.seconds / one.seconds for one, other in pairs),
        "same_tokens": all(_bits(one) == _bits(other) for one, other in pairs),
    }


def _bits(measured: Measured) -> list[tuple[list[int], list[float]]]:
    return [(t.token_ids.tolist(), t.rollout_log_probs.tolist()) for t in measured.trajectories]


def _flush(group: RolloutGroup) -> None:
    for client in group.clients:
        client.flush_cache()
