"""Episodes act at a real server of openenv-core, which shares nothing with this process but a socket.

Its pins are none of ours, so it may be installed in an environment of its own:
    python -m venv DIR && DIR/bin/pip install openenv-core==0.3.0 && export OPENENV_PYTHON=DIR/bin/python
"""

import asyncio
import os
import subprocess
import sys
import threading
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from onpolicy.agents.environments import stepped
from onpolicy.agents.environments.stepped import OpenEnv
from onpolicy.errors import AgentError
from tests.support.acting import PROMPT, Acts, Draws, Says, begin, decode

SERVER = Path(__file__).parents[3] / "support" / "openenv_server.py"
PYTHON = os.environ.get("OPENENV_PYTHON", sys.executable)

pytestmark = pytest.mark.skipif(
    sys.executable == PYTHON and find_spec("openenv") is None,
    reason="openenv-core is not installed: install openenv-core==0.3.0 anywhere, and name that Python "
    "in OPENENV_PYTHON",
)


@pytest.fixture(scope="module")
def url():
    with subprocess.Popen([PYTHON, SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


def begun(url, draws, make=OpenEnv):
    """An episode under way at the server."""
    values = {"observation": "text", "fixed": {"times": 2}, "reset": {"begin": 7}}
    made = partial(make, url, "number", **values)

    def tokens_of(given, so_far):
        return [ord(character) for character in given]

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
