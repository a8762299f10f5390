"""Programs play episodes through the gateway, and what they do wrong fails theirs alone."""

import json
import sys
import time
from dataclasses import replace
from itertools import pairwise

import psutil
import pytest

from onpolicy.agents.agent_workers import WorkerRollouter
from onpolicy.agents.gateway.gateway_server import Gateway
from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.agents.gateway.session import SessionRules
from onpolicy.agents.gateway.session_rollouter import acts_by
from onpolicy.agents.program import command_of, program_function
from onpolicy.errors import AgentError, ConfigError
from tests.support.acting import PROMPT, Draws, SpelledOut, begin, decode, roll_out

PROGRAM = [sys.executable, "-S", "tests/support/agent_programs.py"]


def rules():
    return SessionRules(template=SpelledOut(), parser=AnswerParser())


def rollouter_of(command=PROGRAM, at_once=None, **how):
    function = program_function(command, **{"repeats": False, **how})
    return acts_by(WorkerRollouter(function, 1, 30.0), lambda: Gateway(rules()), at_once)


@pytest.fixture(scope="module")
def rollouter():
    made = rollouter_of()
    yield made
    made.close()


def played(rollouter, label, draws=None, **metadata):
    prompt = replace(PROMPT, label=label, metadata=metadata)
    return roll_out(rollouter, draws or Draws(), prompt=prompt).samples[0]


def test_a_program_is_told_its_session_and_row_and_says_its_reward(rollouter):
    sample = played(rollouter, "rewarded", Draws(["yes"]))
    assert (sample.reward, sample.is_rewarded, sample.metrics["own"]) == (8.0, True, 2.0)
    assert decode(sample.trajectory.response_ids) == sample.info["text"] + "<stop>"


def test_its_environment_and_its_input_say_the_same_and_no_proxy_is_asked(monkeypatch):
    """Clients ask a proxy for this host too, which answers 502 (hermes-agent issue 25319)."""
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    own = rollouter_of()
    info = played(own, "told", session="the row's own").info
    own.close()
    told, known = info["row"], info["known"]
    assert info["own"] and told["metadata"] == {"session": "the row's own"}
    assert (told["prompt"], told["label"], told["messages"]) == (PROMPT.text, "told", None)
    assert known == {
        "OPENAI_BASE_URL": told["base_url"],
        "OPENAI_API_KEY": told["api_key"],
        "OPENAI_MODEL": "policy",
        "ANTHROPIC_BASE_URL": told["base_url"].removesuffix("/v1"),
        "ANTHROPIC_API_KEY": told["api_key"],
    }
    assert info["no"] == "example.org,127.0.0.1"


def test_a_row_too_long_for_a_variable_is_read_from_the_input(rollouter):
    """Linux starts none with such a variable, "Argument list too long" (oz-agent-action issue 47)."""
    assert played(rollouter, "rewarded", long="x" * 300_000).reward == 8.0


def test_without_a_reward_the_run_says_it_and_printed_megabytes_are_dropped(rollouter):
    assert not played(rollouter, "silent").is_rewarded
    assert played(rollouter, "loud").reward == 0.5


@pytest.mark.parametrize(
    ("label", "reason", "text"),
    [
        ("fails", "raised", r"ended with exit code 3, and printed last: \\x1b\[31mno such tool"),
        ("dies", "died", "ended with SIGKILL"),
        ("twice", "result", "printed 2 rewards, and an episode has one"),
        ("pays itself", "result", "printed a reward without the key of its session"),
        ('{{"api_key": "another", "reward": 1}}', "result", "printed a reward without the key of"),
        ('{{"api_key": "{key}", "reward": "high"}}', "result", "reward='high', which must be a number"),
        ('{{"api_key": "{key}", "reward": true}}', "result", "reward=True, which must be a number"),
        ('{{"api_key": "{key}", "reward": NaN}}', "result", "reward.*nan"),
        ('{{"api_key": "{key}", "rewards": 1}}', "result", r"an answer with \['rewards'\]"),
        ('{{"api_key": "{key}", "info": 1}}', "result", "info=1, which must be an object"),
        ("reward: 1 {key}", "result", "its key in a line that is no JSON object"),
    ],
)  # fmt: skip
def test_a_program_that_fails_fails_its_episode_and_says_how(rollouter, label, reason, text):
    """What the policy can write must not pass for the program's word, as rewards did where agents could
    reach the file of them (pier issue 51; OpenEnv pull request 1200, also of "nan")."""
    with pytest.raises(AgentError, match=text) as raised:
        played(rollouter, label)
    assert raised.value.reason == reason


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(holds):
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_children_that_a_program_leaves_are_killed_with_its_group_or_with_the_run():
    """They hold its output open, and who reads that to its end waits for them (cpython issue 76116)."""
    own = rollouter_of()
    info = played(own, "leaves").info
    wait_for(lambda: is_gone(info["child"]))
    assert not is_gone(info["away"])  # in a session of its own
    own.close()
    wait_for(lambda: is_gone(info["away"]))


def test_a_program_that_hangs_is_killed_with_its_group_at_the_time_limit(rollouter, tmp_path):
    row = replace(PROMPT, label="waits", metadata={"file": str(tmp_path / "pids")})
    with pytest.raises(AgentError, match="more than --episode-time-limit=3 seconds"):
        roll_out(rollouter, prompt=row, time_limit=3.0)
    pids = json.loads((tmp_path / "pids").read_text())
    wait_for(lambda: all(map(is_gone, pids)))


def test_a_program_may_play_one_episode_after_another_and_is_replaced():
    own = rollouter_of(repeats=True)
    first = played(own, "at once").info["pid"]
    assert played(own, "rewarded").reward == 8.0
    with pytest.raises(
        AgentError, match=r"ended with exit code 3, and printed last: .*no such tool"
    ):
        played(own, "fails")
    second = played(own, "at once").info["pid"]
    assert first != second and is_gone(first)
    psutil.Process(second).kill()
    wait_for(lambda: is_gone(second))
    third = played(own, "at once").info["pid"]
    assert third not in (first, second)
    with pytest.raises(AgentError, match="printed 2 rewards"):
        played(own, "twice")
    with pytest.raises(AgentError, match="ended with exit code 0 before it answered"):
        played(own, "leaves early")
    own.close()


def test_episodes_wait_for_a_program_outside_their_time(tmp_path):
    """Three episodes of a second each, one at a time, with a limit of 1.9: none is late."""
    own, draws = rollouter_of(at_once=1), [Draws(), Draws(), Draws()]
    played(own, "silent")  # what a worker takes to start is no part of this
    prompt = replace(PROMPT, label="takes a second")
    begun = [begin(own, each, prompt=prompt, time_limit=1.9) for each in draws]
    assert all(each.ended_episodes.acquire(timeout=100) for each in draws)
    assert [episode.error for episode in begun] == [None] * 3
    spans = sorted(episode.samples[0].info["span"] for episode in begun)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    own.close()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("no-such-agent --fast", "there is no program 'no-such-agent' that can be executed"),
        ("", "there is no program ''"),
        ("tests/support/agent_programs.py", "that can be executed"),
        ("python 'agent.py", "No closing quotation"),
    ],
)
def test_a_command_that_cannot_start_is_refused_before_the_run(command, text):
    with pytest.raises(ConfigError, match=f"--agent-command={command}.*{text}"):
        command_of(command)


def test_a_file_that_is_no_program_fails_its_episode(tmp_path):
    assert command_of("python 'my agent.py'") == ["python", "my agent.py"]
    file = tmp_path / "agent"
    file.write_bytes(b"\x7fELF")
    file.chmod(0o755)
    own = rollouter_of([str(file)])
    with pytest.raises(AgentError, match=r"could not start .*Exec format error"):
        played(own, "")
    own.close()
