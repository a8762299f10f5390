import json
import os
import subprocess
import sys

import pytest

from onpolicy.config.groups import DataConfig
from onpolicy.errors import ConfigError
from onpolicy.rollout import reasoning_gym
from onpolicy.rollout.prompts import load_prompts
from tests.support.tiny import make_tokenizer

NAMES = "reasoning-gym:chain_sum,leg_counting"


def questions(source=NAMES, size=3, seed=0, flag="--prompt-data"):
    return [row["prompt"] for _, row in reasoning_gym.rows_of(source, size, seed, flag)]


def test_a_problem_is_a_function_of_seed_name_and_number():
    three = questions()
    assert len(three) == 6
    assert questions(size=5)[:3] == three[:3]
    assert questions("reasoning-gym:leg_counting") == three[3:]
    assert questions(seed=1) != three
    assert questions(flag="--eval-prompt-data") != three


def test_problems_become_prompts_that_name_their_rule_whatever_the_keys_of_files():
    config = DataConfig(reasoning_gym_size=3, input_key="question", label_key="answer")
    prompts = load_prompts(NAMES, config, make_tokenizer(), 9999)
    assert [prompt.text for prompt in prompts] == questions()
    assert {prompt.rule for prompt in prompts} == {"reasoning_gym"}
    assert json.loads(prompts[0].label)["name"] == "chain_sum"


ANOTHER_PROCESS = """
import sys
from onpolicy.rollout.reasoning_gym import rows_of
print([row for _, row in rows_of(sys.argv[1], 3, 0, "--prompt-data")])
"""


@pytest.mark.parametrize(("name", "is_same"), [(NAMES, True), ("reasoning-gym:ransom_note", False)])
def test_another_process_makes_the_same(name, is_same):
    """Or, by its hashes, others: those are refused."""
    command = [sys.executable, "-c", ANOTHER_PROCESS, name]
    made = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("1", "2")
    ]
    assert (made[0].stdout == made[1].stdout) is is_same
    assert made[0].stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no dataset 'nothing'. Known: ab, "),
        ("arc_agi", "compares what JSON does not hold"),
        ("ransom_note", "are others in every process.* Set PYTHONHASHSEED=0"),
    ],
)
def test_datasets_that_cannot_be_used_are_refused(name, message, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=message):
        questions(f"reasoning-gym:chain_sum,{name}")
