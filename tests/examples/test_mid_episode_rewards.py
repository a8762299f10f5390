"""Rewards in mid-episode: what the market pays, and what each estimator teaches of the choice."""

import asyncio
import json
import random
from collections import Counter
from itertools import combinations_with_replacement
from math import factorial, prod
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

from onpolicy.algorithm.estimators import generalized_advantages, group_advantages
from onpolicy.system.user_functions import load_function

EXAMPLE = Path(__file__).parents[2] / "examples/mid_episode_rewards"
SHARES = {"wild": 0.6, "calm": 0.4}
EPISODES = [choice + lot for choice in "is" for lot in "09"]
"""Either choice, and a lucky digit or one that is not: as likely as each other."""


def of_example(name):
    return load_function(f"{EXAMPLE}/{name}", "example")


MARKET = of_example("environment.py:Market")


def played(kind, actions, luck=4.0):
    market = MARKET(luck=luck)
    market.reset(SimpleNamespace(label=kind, metadata={"lucky": "01234"}))
    steps = [asyncio.run(market.step(action)) for action in actions]
    assert [is_done for *_, is_done in steps] == [False] * (len(actions) - 1) + [True]
    return [reward for _, reward, _ in steps]


def test_a_choice_is_paid_at_once_and_a_lot_whatever_was_chosen():
    assert [played("wild", e) for e in EPISODES] == [[2, 4], [2, -4], [0, 4], [0, -4]]
    assert [played("calm", e) for e in EPISODES] == [[0, 0], [0, 0], [1, 0], [1, 0]]
    assert played("wild", "i0", luck=0) == [2, 0]
    assert played("calm", "5") == played("wild", "5") == [0]  # no choice: it is over


def expected(advantages_of, luck=4.0, group=16):
    """(of investing, of saving): the mean advantage of the choice over all groups of a policy that does
    everything as often. advantages_of: the choice's in each episode of a group, of rewards by turn."""
    sums, counts = Counter(), Counter()
    for kind, share in SHARES.items():
        paid = {episode: played(kind, episode, luck) for episode in EPISODES}
        for episodes in combinations_with_replacement(EPISODES, group):
            ways = factorial(group) / prod(map(factorial, Counter(episodes).values()))
            chance = share * ways / len(EPISODES) ** group
            for e, a in zip(episodes, advantages_of([paid[e] for e in episodes]), strict=True):
                sums[e[0]] += chance * a
                counts[e[0]] += chance
    return sums["i"] / counts["i"], sums["s"] / counts["s"]


def compared(estimator):
    return lambda rewards: group_advantages([[sum(r) for r in rewards]], estimator)[0]


def by_critic(lambd):
    """With a critic that is right: a choice is worth 0.8 before it is made, and nothing after it."""
    return lambda rewards: [generalized_advantages(r, [0.8, 0.0], 1.0, lambd)[0] for r in rewards]


def test_investing_pays_more_and_the_spread_of_a_group_teaches_saving():
    saves, invests = expected(compared("grpo")), expected(compared("grpo"), luck=0)
    assert saves[0] < -0.2 < 0.2 < saves[1]
    assert invests[0] > 0.1 and invests[1] < -0.1  # without lots, which no choice moves
    in_all = 15 / 16 * 0.4  # its own reward is in the mean
    assert expected(compared("dr_grpo")) == pytest.approx((in_all, -in_all))
    for lambd in (0.0, 0.95):
        assert expected(by_critic(lambd)) == pytest.approx((0.4, -0.4))


def test_lots_are_in_no_advantage_of_a_choice_by_a_critic_whose_word_is_taken():
    rewards = [played("wild", e) for e in EPISODES]
    assert by_critic(0.0)(rewards) == pytest.approx([1.2, 1.2, -0.8, -0.8])
    assert by_critic(1.0)(rewards) == pytest.approx([5.2, -2.8, 3.2, -4.8])
    assert compared("dr_grpo")(rewards) == pytest.approx([5, -3, 3, -5])


def test_neither_kind_nor_luck_can_be_told_from_a_years_number():
    years = of_example("prepare.py:years")(random.Random(0))
    assert len({year["prompt"] for year in years}) == len(years) == 1000
    assert Counter(year["label"] for year in years) == {"wild": 600, "calm": 400}
    for digit in "0123456789":
        assert fmean(digit in year["lucky"] for year in years) == pytest.approx(0.5, abs=0.05)


def test_the_share_of_investing_is_counted_over_rollouts(tmp_path):
    (tmp_path / "samples").mkdir()
    for rollout in range(6):
        lines = ['{"response": "i3"}\n', '{"response": "%s7"}\n' % ("i" if rollout > 4 else "s")]
        (tmp_path / f"samples/rollout_{rollout:06}.jsonl").write_text("".join(lines))
    assert of_example("choices.py:invested")(tmp_path) == [0.5, 1.0]


def test_what_was_recorded_had_no_token_mismatched_and_ended_as_the_page_says():
    record = json.loads(
        (EXAMPLE.parents[1] / "benchmarks/results/mid_episode_rewards.json").read_text()
    )
    assert not any(run["mismatched_tokens"] for run in record["runs"].values())
    page = (EXAMPLE / "README.md").read_text()
    assert f"{sum(run['tokens'] for run in record['runs'].values()):,} tokens" in page
    ends = [
        ", ".join(f"{record['runs'][f'{name}-{seed}']['invested'][5]:.2f}" for seed in (0, 1))
        for name in ("grpo", "gae", "dr_grpo", "no_luck")
    ]
    assert f"| 25-29 | {' | '.join(ends)} |" in page
