"""Episodes whose functions run in worker processes are those that run in this one."""

import subprocess
import sys
import threading
import time

import psutil
import pytest

from onpolicy.agents.agent_workers import AgentFunction, WorkerRollouter
from onpolicy.agents.function import FunctionRollouter, load_agent
from onpolicy.errors import AgentError, ConfigError
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.rollout.turns import EpisodeRules
from onpolicy.trajectory import Completion, FinishReason, Span
from onpolicy.types import Prompt, Request, SamplingParams
from tests.support.processes import command_line

FUNCTIONS = "tests/support/agent_functions.py:"
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=(1,))


class Answers:
    """Answers what episodes ask for at once, with tokens that depend on the request alone."""

    def __init__(self):
        self.done = threading.Event()
        self.keeps_waiting = False

    def asked(self, branch):
        if self.keeps_waiting:
            return
        ask = branch.ask
        request = branch.episode.request(branch, ask)
        count = request.params.max_new_tokens
        seeds = [sampling_seed(request.sampling_seed, *request.prompt_ids, i) for i in range(count)]
        completion = Completion(
            response_ids=[2 + seed % 9 for seed in seeds],
            rollout_log_probs=[-(seed % 1000) / 7 for seed in seeds],
            finish_reason=FinishReason.LENGTH,
            weight_version=3,
            num_cached_tokens=1,
            spans=(Span(version=3, start=0, end=count),),
        )
        branch.episode.add(branch, ask, completion)

    def ended(self, episode):
        self.done.set()


def prompt_of(label="", index=5):
    return Prompt(index=index, prompt_ids=[4, 2, 7], label=label, text="", metadata={"a": {1, 2}})


def begin(rollouter, prompt=None, answers=None, time_limit=None):
    """An episode under way, and what says when it has ended."""
    prompt = prompt or prompt_of()
    request = Request(prompt_ids=prompt.prompt_ids, sampling_seed=11, params=PARAMS)
    rules = EpisodeRules(max_context_len=100, time_limit=time_limit)
    episode, answers = OpenEpisode(rollouter, prompt, request, rules), answers or Answers()
    episode.go_on(answers)
    return episode, answers


def rolled_out(rollouter, prompt=None):
    episode, answers = begin(rollouter, prompt)
    assert answers.done.wait(60)
    if episode.error is not None:
        raise episode.error
    return episode.samples


@pytest.fixture
def workers():
    """Makes rollouters whose workers end with the test."""
    made = []

    def make(name, count=1, hang_limit=30.0, **arguments):
        function = AgentFunction(path=FUNCTIONS + name, arguments=arguments)
        made.append(WorkerRollouter(function, count, hang_limit))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert [p for p in psutil.Process().children() if "worker_process" in command_line(p)] == []


def here(name, **arguments):
    return FunctionRollouter(load_agent(FUNCTIONS + name, "--flag", arguments))


@pytest.mark.parametrize("name", ["two_turns", "mistakes"])
def test_an_episode_is_the_same_in_a_worker_and_here(workers, name):
    samples = rolled_out(here(name))
    assert rolled_out(workers(name)) == samples
    assert samples[0].trajectory.num_sampled


def test_what_is_known_of_an_episode_comes_back(workers):
    samples = rolled_out(workers("two_turns"))
    assert all(s.metrics == {"calculator_calls": 1, "own": 2.0} for s in samples)
    assert [s.reward for s in samples] == [0.25, 1.5]
    assert all(s.info["left"] == 3 for s in samples)
    assert [s.trajectory.forks for s in samples] == [(("other", 7),), ()]
    assert [s.trajectory.spans for s in samples] == [
        (Span(version=3, start=0, end=5),),
        (Span(version=3, start=0, end=2),),
    ]


def test_mistakes_are_raised_where_they_are_made(workers):
    told = rolled_out(workers("mistakes"))[0].info["told"]
    assert told[0].startswith("ContextExceededError: 3 tokens and 10000 more")
    assert "tokenizer" in told[1]
    assert "length=99" in told[2]
    assert "'a'" in told[3]
    assert "max_tokens=0" in told[4]


def test_observations_are_made_in_the_worker_and_kept_in_the_run(workers):
    before = time.time_ns()
    info = rolled_out(workers("observes"))[0].info
    assert info["value"]["now"][0] > before
    assert info["value"]["now"][1:] == [None, "ü"]
    assert info["error"] == "'no clock'"


def test_an_answer_that_is_given_up_is_withdrawn(workers):
    class Late(Answers):
        num_asked = 0

        def asked(self, branch):
            self.num_asked += 1
            if self.num_asked > 1:
                super().asked(branch)

    episode, answers = begin(workers("asks_for_much"), answers=Late())
    assert answers.done.wait(60)
    assert episode.error is None
    assert answers.num_asked == 2
    assert len(episode.trajectories[0].token_ids) == 3 + 8


def test_a_function_may_return_some_of_its_turns(workers):
    (kept,) = rolled_out(workers("by_prompt"), prompt_of("branches"))
    assert kept.trajectory.forks == ()


def test_a_function_has_arguments_of_its_own(workers):
    (sample,) = rolled_out(workers("with_arguments", greeting="hello"))
    assert sample.info == {"greeting": "hello"}


@pytest.mark.parametrize("make", [lambda workers, name: workers(name), lambda _, name: here(name)])
@pytest.mark.parametrize(
    ("label", "reason", "text"),
    [
        ("raise", "raised", r"raised RuntimeError: a bad day \(agent_functions.py, line \d+\)"),
        ("exit", "raised", "raised SystemExit: 3"),
        ("cancel", "raised", "raised CancelledError"),
        ("nonsense", "result", "returned {'reward': 1}, and must return an Episode"),
    ],
)
def test_a_function_that_fails_fails_its_episode_alone(workers, make, label, reason, text):
    rollouter = make(workers, "by_prompt")
    with pytest.raises(AgentError, match=text) as raised:
        rolled_out(rollouter, prompt_of(label))
    assert raised.value.reason == reason
    assert rolled_out(rollouter, prompt_of("fine"))[0].info["worker"]


def test_a_function_that_exceeds_the_context_says_so(workers):
    with pytest.raises(AgentError, match="exceed") as raised:
        rolled_out(workers("exceeds"))
    assert raised.value.reason == "context"


@pytest.mark.parametrize("label", ["no JSON", "forge"])
def test_a_worker_says_nothing_but_json_and_turns(workers, label):
    with pytest.raises(AgentError) as raised:
        rolled_out(workers("by_prompt"), prompt_of(label))
    assert raised.value.reason == "result"


@pytest.mark.parametrize(
    ("label", "reason", "text"),
    [
        ("hang", "hung", r"computes for longer than 3 seconds at .*agent_functions.py, line \d+"),
        ("hold", "hung", "stands still: it was stopped, or a function computes and lets no"),
        ("die", "died", "SIGKILL"),
    ],
)
def test_a_worker_that_is_lost_is_replaced(workers, label, reason, text):
    rollouter = workers("by_prompt", hang_limit=3.0)
    first = rolled_out(rollouter, prompt_of("fine"))[0].info["worker"]
    beside, answers = begin(rollouter, prompt_of("wait", index=9))
    with pytest.raises(AgentError, match=text) as raised:
        rolled_out(rollouter, prompt_of(label))
    assert raised.value.reason == reason
    assert answers.done.wait(60)
    assert isinstance(beside.error, AgentError)
    assert beside.error.reason == ("hung" if label == "hold" else "died")
    assert rolled_out(rollouter, prompt_of("fine"))[0].info["worker"] != first
    assert not psutil.pid_exists(first)


def test_a_worker_that_is_stopped_is_found_by_its_silence_and_replaced(workers):
    rollouter = workers("by_prompt", hang_limit=3.0)
    first = rolled_out(rollouter, prompt_of("fine"))[0].info["worker"]
    psutil.Process(first).suspend()
    with pytest.raises(AgentError, match=r"stands still: it was stopped, or .*SIGKILL") as raised:
        rolled_out(rollouter, prompt_of("fine"))
    assert raised.value.reason == "hung"
    assert rolled_out(rollouter, prompt_of("fine"))[0].info["worker"] != first
    assert not psutil.pid_exists(first)


def test_a_guard_that_is_stopped_ends_its_worker_all_the_same(workers):
    rollouter = workers("by_prompt")
    worker = psutil.Process(rolled_out(rollouter, prompt_of("fine"))[0].info["worker"])
    worker.parent().suspend()
    rollouter.close()
    assert not worker.is_running()


def test_a_function_that_stays_when_it_is_cancelled_is_named_and_its_worker_ends(workers, caplog):
    rollouter = workers("by_prompt", hang_limit=3.0)
    first = rolled_out(rollouter, prompt_of("fine"))[0].info["worker"]
    beside, _ = begin(rollouter, prompt_of("wait", index=9))
    begin(rollouter, prompt_of("stay", index=7), answers := Answers(), time_limit=1.0)
    assert answers.done.wait(60)
    while "prompt 7, sample 0: a function goes on 3 seconds after" not in caplog.text:
        time.sleep(0.05)
    assert rolled_out(rollouter, prompt_of("fine"))[0].info["worker"] != first
    assert psutil.pid_exists(first), "the other episode in it goes on"
    beside.end()
    while psutil.pid_exists(first):
        time.sleep(0.05)


def test_one_that_stays_in_this_process_is_named(monkeypatch, caplog):
    monkeypatch.setattr("onpolicy.rollout.open_episode.PATIENCE", 0.1)
    begin(here("by_prompt"), prompt_of("stay", index=7), answers := Answers(), time_limit=1.0)
    assert answers.done.wait(60)
    while "prompt 7, sample 0: a function goes on 0.1 seconds after it" not in caplog.text:
        time.sleep(0.05)


def test_a_function_that_cannot_be_used_is_refused(workers):
    for name, text in (("not_async", "not_async: is not async"), ("absent", "has no 'absent'")):
        with pytest.raises(ConfigError, match=text):
            rolled_out(workers(name))


def test_many_episodes_are_open_at_once_in_two_workers(workers):
    rollouter = workers("by_prompt", count=2)
    begun = [begin(rollouter, prompt_of("fine", index=i)) for i in range(40)]
    assert all(answers.done.wait(60) for _, answers in begun)
    assert len({episode.samples[0].info["worker"] for episode, _ in begun}) == 2


def test_what_workers_began_ends_with_them(workers):
    rollouter = workers("by_prompt")
    info = rolled_out(rollouter, prompt_of("orphan"))[0].info
    assert psutil.pid_exists(info["pid"])
    rollouter.close()
    assert not psutil.pid_exists(info["pid"])
    assert not psutil.pid_exists(info["worker"])
    with pytest.raises(AgentError, match="the run has ended"):
        rolled_out(rollouter, prompt_of("fine"))


KILLED = """
import sys, time
from tests.onpolicy.agents.test_agent_workers import *
rollouter = WorkerRollouter(AgentFunction(path=FUNCTIONS + "by_prompt"), 1, 30.0)
print(rolled_out(rollouter, prompt_of("orphan"))[0].info, flush=True)
time.sleep(3600)
"""


def test_workers_end_when_the_run_is_killed():
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as run:
        info = eval(run.stdout.readline())
        run.kill()
    while any(psutil.pid_exists(info[name]) for name in ("pid", "worker")):
        time.sleep(0.05)
