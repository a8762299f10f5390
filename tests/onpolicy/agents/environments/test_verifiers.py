"""Environments of the `verifiers` package act through the gateway, unmodified."""

import asyncio
import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from onpolicy.agents.environments import verifiers as ours
from onpolicy.agents.function import FunctionRollouter
from onpolicy.agents.gateway.gateway_server import Gateway
from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.agents.gateway.session import SessionRules
from onpolicy.agents.gateway.session_rollouter import acts_by
from onpolicy.errors import AgentError, ConfigError
from onpolicy.types import Prompt
from tests.support.acting import Draws, Says, SpelledOut, decode, roll_out

pytest.importorskip(
    "verifiers", reason="verifiers is not installed: pip install 'onpolicy[agents]'"
)

NAME = "tests.support.environments_for_verifiers"
CALL = '<tool_call>\n{"name": "product", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def rolled_out(words=(), row=1, draws=None, **arguments):
    """An episode with a row of the dataset."""
    given = {"name": NAME, "arguments": json.dumps(arguments)}
    (found,) = [each for n, each in enumerate(ours.rows(*given.values())) if n == row]
    metadata = {ours.INPUT: found[ours.INPUT]}
    prompt = Prompt(index=row, prompt_ids=[1], label=found["label"], text="", metadata=metadata)
    rules = SessionRules(template=SpelledOut(), parser=AnswerParser(tool_call_parser="hermes"))

    async def function(turns, prompt):
        return await ours.roll_out(turns, prompt, **given)

    gateway = Gateway(rules)
    rollouter = acts_by(FunctionRollouter(function), lambda: gateway)
    return roll_out(rollouter, draws or Draws(words), prompt=prompt)


def test_what_its_workers_take_to_start_is_none_of_an_episodes_time():
    class Starts(FunctionRollouter):
        readied = closed = 0

        async def ready(self):
            self.readied += 1

        def close(self):
            self.closed += 1

    inner = Starts(None)
    rollouter = acts_by(inner, lambda: None)
    asyncio.run(rollouter.ready())
    rollouter.close()
    assert (inner.readied, inner.closed) == (1, 1)


def spelled(trajectory):
    return decode(trajectory.token_ids)


def test_its_dataset_are_the_prompts():
    rows = list(ours.rows(NAME, "{}"))
    assert [row["prompt"] for row in rows] == [
        [{"role": "user", "content": f"{a}*3="}] for a in range(4)
    ]
    assert [row["label"] for row in rows] == ["0", "3", "6", "9"]
    assert rows[2][ours.INPUT]["info"] == {"a": 2} and rows[2][ours.INPUT]["example_id"] == 2


def test_it_is_loaded_once_by_threads_and_leaves_the_signals_of_the_run_alone():
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: ours.load(NAME, '{"kind": "asks" }'), range(4)))
    assert len(made) == 1
    ours.load(NAME, '{"kind":  "asks"}')
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_an_environment_of_several_turns_is_rewarded_by_its_rubric():
    episode = rolled_out(words=["yes"], kind="asks")
    (trajectory,) = episode.trajectories
    text = spelled(trajectory)
    assert text.startswith("user:1*3=|assistant:") and "user:2?|" in text and "user:4?|" in text
    sampled = [t for t, s in zip(trajectory.token_ids, trajectory.sampled, strict=True) if s]
    answers = decode(sampled).split("<stop>")[:-1]
    assert len(answers) == 3 and episode.samples[0].reward == 1 / (1 + len(answers[-1]))
    assert episode.samples[0].info == {"ended": "max_turns_reached", "is_truncated": False}
    assert episode.samples[0].metrics["verifiers/num_turns"] == 3
    assert "verifiers/is_short" in episode.samples[0].metrics
    assert episode.samples[0].metrics["verifiers/empty_answers"] == 0


def test_an_answer_without_text_is_scored_by_the_rubric_and_learnt():
    """To the package it is an error that ends the episode; the policy would give ever more of them."""
    episode = rolled_out(draws=Says(["ab", ""]), kind="asks")
    (trajectory,) = episode.trajectories
    assert decode(trajectory.response_ids) == "ab<stop><stop>"
    assert episode.samples[0].reward == 1 / (1 + len("2?"))  # of the last message, a question
    assert episode.samples[0].metrics["verifiers/empty_answers"] == 1
    with pytest.raises(AgentError, match="Error calling reward function is_short"):
        rolled_out(draws=Says([""]), kind="asks")  # which takes a chat of one message


def test_tools_are_called_and_their_results_are_given():
    episode = rolled_out(words=[CALL] * 20, kind="tools", max_turns=2)
    (trajectory,) = episode.trajectories
    text = spelled(trajectory)
    assert "tools:" in text and '"name": "product"' in text and "tool:6|" in text
    given = [t for t, s in zip(trajectory.token_ids, trajectory.sampled, strict=True) if not s]
    assert CALL not in decode(given)
    assert episode.samples[0].metrics["verifiers/product_calls"] >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "dies"}, "the sandbox is gone"),
        ({"kind": "single", "reward": "raises"}, "Error calling reward function raises"),
    ],
)
def test_what_dies_before_scoring_fails_the_episode_and_is_no_reward_of_0(arguments, message):
    with pytest.raises(AgentError, match=message):
        rolled_out(words=["yes"] * 20, **arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("no-such-environment", {}, "cannot be loaded"),
        (NAME, {"unknown": 1}, "unexpected keyword argument 'unknown'"),
        (NAME, {"kind": "single", "reward": "compares"}, "compare the episodes of a prompt"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(name, arguments, message):
    with pytest.raises(ConfigError, match=f"--environment=verifiers:{name}.*{message}"):
        ours.load(name, json.dumps(arguments))
