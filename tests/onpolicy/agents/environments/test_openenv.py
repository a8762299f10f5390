"""Episodes act at real servers of openenv, which share nothing with this process but a socket.

Its pins are none of ours, so it is installed in a Python of its own (examples/openenv).
"""

import asyncio
import subprocess
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from onpolicy.agents.environments import openenv_tools, stepped
from onpolicy.agents.environments.stepped import OpenEnv
from onpolicy.agents.function import FunctionRollouter
from onpolicy.agents.gateway.gateway_server import Gateway
from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.agents.gateway.session import SessionRules
from onpolicy.agents.gateway.session_rollouter import acts_by
from onpolicy.errors import AgentError
from tests.support.acting import PROMPT, Acts, Draws, Says, SpelledOut, begin, decode, roll_out
from tests.support.own_pythons import python_of

SERVER = Path(__file__).parents[3] / "support" / "openenv_server.py"


@contextmanager
def serving(*kind):
    command = [python_of("openenv"), SERVER, *kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def url():
    with serving() as url:
        yield url


@pytest.fixture(scope="module")
def url_of_tools():
    with serving("tools") as url:
        yield url


def begun(url, draws, make=OpenEnv):
    """An episode under way at the server."""
    values = {"observation": "text", "fixed": {"times": 2}, "reset": {"begin": 7}}
    made = partial(make, url, "number", **values)

    def tokens_of(given, so_far):
        return [ord(character) for character in given], ()

    acts = Acts(lambda prompt, turns: stepped.play(turns, prompt, made, "turn"))
    return begin(acts, draws, tokens_of=tokens_of, on_failure="drop")


def ended(episode, draws):
    assert draws.ended_episodes.acquire(timeout=100)
    if episode.failures:
        raise episode.failures[0].error
    (trajectory,) = episode.trajectories
    return decode(trajectory.token_ids), episode.samples[0].token_rewards


def test_an_episode_reads_what_the_server_observes_and_is_paid_what_it_pays(url):
    draws = Says(["ab", "c", "abc"])
    text, rewards = ended(begun(url, draws), draws)
    assert text == f"{PROMPT.text}7|ab<stop>11|c<stop>13|abc<stop>"
    assert rewards == [0, 0, 11, 0, 13, 0, 0, 0, 19]


def test_two_episodes_at_once_have_an_environment_each(url):
    """Neither takes a second action before the other's first one has been answered."""
    answered = threading.Barrier(2)

    class Meets(OpenEnv):
        has_met = False

        async def step(self, action):
            found = await super().step(action)
            if not self.has_met:
                self.has_met = True
                await asyncio.to_thread(answered.wait, 60)
            return found

    draws = {"a": Says(["a"]), "bbb": Says(["bbb"])}
    episodes = {word: begun(url, each, Meets) for word, each in draws.items()}
    found = {word: ended(episode, draws[word]) for word, episode in episodes.items()}
    assert found["a"][0].endswith("7|a<stop>9|a<stop>11|a<stop>")
    assert found["bbb"][0].endswith("7|bbb<stop>13|bbb<stop>19|bbb<stop>")
    assert sum(found["a"][1]) == 9 + 11 + 13 and sum(found["bbb"][1]) == 13 + 19 + 25


def test_what_the_server_refuses_fails_the_episode_and_no_other(url):
    wrong, right = Says(["a", "z"]), Says(["a"])
    failing, going = begun(url, wrong), begun(url, right)
    with pytest.raises(AgentError, match=r"step .*'number': 'z'.* is refused: .*z is no number"):
        ended(failing, wrong)
    assert ended(going, right)[0].endswith("11|a<stop>")


def test_a_server_that_is_not_there_fails_the_episode():
    draws = Draws()
    with pytest.raises(AgentError, match=r"Cannot connect to host 127\.0\.0\.1:1"):
        ended(begun("http://127.0.0.1:1", draws), draws)


def rolled_out_by_tools(url, *answers):
    rules = SessionRules(template=SpelledOut(), parser=AnswerParser(tool_call_parser="pythonic"))

    async def function(turns, prompt):
        return await openenv_tools.roll_out(turns, prompt, url=url, observation="text")

    rollouter = acts_by(FunctionRollouter(function), lambda: Gateway(rules))
    return roll_out(rollouter, Says(list(answers))).samples[0]


def test_calls_of_mcp_tools_are_actions_and_their_results_are_read(url_of_tools):
    """A text in one field cannot be one (the server: "Input should be a valid dictionary")."""
    sample = rolled_out_by_tools(url_of_tools, "[add(number=3)]", "[add(number=4)]")
    text = decode(sample.trajectory.token_ids)
    assert '"name": "add"' in text and "user:add|" in text and "tool:sum 3|" in text
    assert (sample.reward, sample.info["ended"]) == (3.0 + 7.0, "done")
    assert decode(sample.trajectory.response_ids).count("<stop>") == 2


def test_an_answer_without_calls_ends_the_episode_and_wrong_calls_are_told(url_of_tools):
    sample = rolled_out_by_tools(url_of_tools, "[add(number=3)]", "[add(other=4)]", "3")
    text = decode(sample.trajectory.token_ids)
    assert "tool:error: " in text and text.endswith("assistant:3<stop>")
    assert (sample.reward, sample.info["ended"]) == (3.0 + 3.0, "answer")
