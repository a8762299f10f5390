"""The calculator agent: what calls cost, which policy is best, and what its launcher and table say."""

import asyncio
import json
import random
from itertools import product
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

from onpolicy.system.user_functions import load_function

EXAMPLE = Path(__file__).parents[2] / "examples/calculator_agent"


def of_example(name):
    return load_function(f"{EXAMPLE}/{name}", "example")


CALCULATOR = of_example("environment.py:Calculator")


def played(label, *actions, most_calls=2):
    """What is read after each action, and the reward of the episode."""
    environment = CALCULATOR(most_calls=most_calls)
    environment.reset(SimpleNamespace(label=label))
    steps = [asyncio.run(environment.step(action)) for action in actions]
    assert [is_done for *_, is_done in steps] == [False] * (len(actions) - 1) + [True]
    return [read for read, *_ in steps], sum(reward for _, reward, _ in steps)


def test_the_right_product_has_its_reward_and_a_call_its_price():
    assert played("28", "28") == ([""], 1.0)
    assert played("28", "27") == ([""], 0.0)
    assert played("2146", "[37*58]", "2146") == (["(2146)", ""], 1 - 0.4)
    assert played("2146", "[37*58]", "2147") == (["(2146)", ""], -0.4)
    assert played("2146", "[37*]", "2146") == (["(0)", ""], 1 - 0.4)
    assert played("28", "[7*4]", "[7*4]", "[7*4]") == (["(28)", "(28)", ""], -0.8)


def test_without_a_calculator_a_call_ends_the_episode_with_nothing():
    assert played("2146", "[37*58]", most_calls=0) == ([""], 0.0)
    assert played("28", "28", most_calls=0) == ([""], 1.0)


@pytest.fixture(scope="module")
def problems():
    return of_example("prepare.py:problems")(random.Random(0))


def test_half_of_the_products_are_easy_and_none_is_there_twice(problems):
    lengths = [len(problem["prompt"]) for problem in problems]
    assert lengths.count(len("7*4=")) == lengths.count(len("37*58=")) == len(problems) / 2
    assert len({problem["prompt"] for problem in problems}) == len(problems)
    assert all(eval(problem["prompt"][:-1]) == int(problem["label"]) for problem in problems)


def test_the_best_policy_calls_for_the_hard_products_alone(problems):
    """All four that decide by the size, with a model that knows the easy products and no other."""

    def reward(problem, calls):
        question, label = problem["prompt"][:-1], problem["label"]
        if calls:
            return played(label, f"[{question}]", label)[1]
        return played(label, label if is_easy(problem) else "0")[1]

    def is_easy(problem):
        return len(problem["prompt"]) == len("7*4=")

    rewards = {
        (on_easy, on_hard): fmean(reward(p, on_easy if is_easy(p) else on_hard) for p in problems)
        for on_easy, on_hard in product([False, True], repeat=2)
    }
    assert rewards == pytest.approx(
        {(False, True): 0.8, (True, True): 0.6, (False, False): 0.5, (True, False): 0.3}
    )


def test_the_table_counts_calls_by_size(tmp_path):
    (tmp_path / "samples").mkdir()
    lines = [
        {"prompt": "7*4=", "response": "28<eos>", "reward": 1.0},
        {"prompt": "7*5=", "response": "[7*5]35<eos>", "reward": 0.6},
        {"prompt": "37*58=", "response": "[37*58]2146<eos>", "reward": 0.6},
    ]
    (tmp_path / "samples/rollout_000000.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (row,) = of_example("calls.py:table")(tmp_path)
    assert (row["calls_easy"], row["reward_easy"]) == (0.5, 0.8)
    assert (row["calls_hard"], row["reward_hard"]) == (1.0, 0.6)
