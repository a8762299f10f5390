from dataclasses import replace
from types import SimpleNamespace

import pytest

from onpolicy.bench.agents import Tool, compare, draw_freely, draw_turn_by_turn, play, tool_of
from onpolicy.config.groups import EngineConfig
from onpolicy.rollout.rollouter import Rollouter
from onpolicy.types import Prompt
from tests.support.engines_in_memory import Host, make_requests

TOOL = Tool(num_turns=3, sampled=2, answer=[5], least=1e-4, most=1e-3)


class Plays(Rollouter):
    async def roll_out(self, prompt, turns):
        return await play(turns, prompt, tool=TOOL)


def test_a_tool_takes_its_part_of_the_tokens():
    config = SimpleNamespace(max_new_tokens=64, num_turns=8, tool_latency=0.5, tool_time_limit=9.0)
    tool = tool_of(config)
    assert (tool.sampled, len(tool.answer)) == (6, 2)
    times = [tool.seconds(episode, turn) for episode in range(200) for turn in range(8)]
    assert min(times) >= 0.5
    assert max(times) == 9.0
    assert tool.seconds(3, 4) == times[3 * 8 + 4]
    assert sorted(times)[len(times) // 2] == pytest.approx(0.5 * 2 ** (1 / 1.2), rel=0.1)


def test_both_ways_draw_the_same_episodes():
    """Requests without stop tokens, as the benchmark has them."""
    requests = [
        replace(each, params=replace(each.params, max_new_tokens=8, ignore_eos=True))
        for each in make_requests(5)
    ]
    prompts = [
        Prompt(index=i, prompt_ids=each.prompt_ids, label="", text="")
        for i, each in enumerate(requests)
    ]
    group = Host().make_group(EngineConfig(rollout_num_engines=1))
    group.launch()
    work = list(zip(prompts, requests, strict=True))
    free, in_turns = draw_freely(group, work, Plays()), draw_turn_by_turn(group, work, TOOL)
    result = compare([free], [in_turns])
    assert result["same_tokens"]
    assert result["ratio"] == in_turns.seconds / free.seconds
    assert [t.num_sampled for t in free.trajectories] == [6] * 5
    assert [len(t.token_ids) for t in free.trajectories] == [len(p.prompt_ids) + 9 for p in prompts]
    others = draw_turn_by_turn(group, work, replace(TOOL, answer=[6]))
    assert not compare([free], [others])["same_tokens"]
