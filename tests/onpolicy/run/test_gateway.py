"""Whole runs of an agent that acts through the gateway have one hash."""

import contextlib
import itertools
import shutil
from functools import partial

import openai
import pytest
import requests

from onpolicy.agents.gateway.gateway_server import Gateway
from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.agents.gateway.session import SessionRules
from onpolicy.agents.gateway.session_rollouter import AgentRollouter, in_thread
from onpolicy.chat.template import ChatTemplate
from onpolicy.rollout.failures import OtherTokensError
from onpolicy.run.run import Run
from tests.onpolicy.run.test_drawing import Clock, journal_of, steps_of
from tests.support.clients import client_of
from tests.support.engines_in_memory import Host
from tests.support.run_in_memory import (
    Interrupted,
    even_tokens,
    interrupted_at,
    run_in_memory,
    samples_of,
)
from tests.support.tiny import make_tokenizer
from tests.support.tiny_policy import END

pytestmark = pytest.mark.usefixtures("one_process")

said = itertools.count()

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% else %}%{% endif %}{% endfor %}"
)


def agent(base_url, api_key, prompt):
    """A chat of two turns, of which the second is begun twice at once."""
    says(base_url, api_key, "#$%&"[: 1 + prompt.index % 4])


def says(base_url, api_key, text):
    with client_of(base_url, api_key) as client:
        messages = [{"role": "user", "content": text}]
        ask = partial(client.chat.completions.create, model="policy", max_tokens=4)
        message = ask(messages=messages).choices[0].message
        messages += [message, {"role": "user", "content": "*" if message.content else ")"}]
        ask(messages=messages, n=2)


def leaves(base_url, api_key, prompt, patience=0.01):
    """Asks for something that it does not wait for, and then acts."""
    client = client_of(base_url, api_key, timeout=patience)
    with client, contextlib.suppress(openai.APITimeoutError):
        messages = [{"role": "user", "content": "("}]
        client.chat.completions.create(model="policy", messages=messages)
    agent(base_url, api_key, prompt)


def make_gateway():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    template = ChatTemplate(tokenizer, (END,))
    return Gateway(SessionRules(template=template, parser=AnswerParser()))


MODES = {
    "lag 0": {},
    "lag 1": {"rollout_lag": 1},
}


class Acts(Run):
    """A run of `agent` through a gateway of its own."""

    act = staticmethod(agent)

    def __init__(self, *args, **more):
        rollouter = AgentRollouter(make_gateway, in_thread(self.act))
        super().__init__(*args, rollouter=rollouter, **more)


class Leaves(Acts):
    act = staticmethod(leaves)


class Waits(Acts):
    act = staticmethod(partial(leaves, patience=2.0))


def run(directory, host=None, make_run=Acts, **values):
    values = {"rollout_max_response_len": 12, "eval_interval": 0, **values}
    return run_in_memory(directory, host or Host(), even_tokens, make_run=make_run, **values)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_no_engine_and_no_arrival_decides_the_hash_of_a_run_of_agents(tmp_path, mode):
    ran = run(tmp_path / "one", **mode)
    assert ran.totals.num_mismatched_tokens == 0 < ran.totals.num_compared_tokens
    dying = Host({9}, {14})
    more = run(tmp_path / "two", dying, rollout_num_engines=2, **mode)
    assert more.run_hash == ran.run_hash and dying.num_restarts
    of_both = [samples_of(tmp_path / name, "rollout_000003") for name in ("one", "two")]
    assert of_both[0] == of_both[1]


def test_the_gateway_of_a_run_listens_no_more_when_it_has_ended(tmp_path):
    def answers(url):
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(url, timeout=10).status_code
        return None

    class Asks(Acts):
        def train(self, groups, step):
            urls.append(self._rollouter._gateway.url)
            assert answers(urls[-1]) == 404
            return super().train(groups, step)

    urls = []
    run(tmp_path, make_run=Asks, num_rollout=1)
    assert urls and answers(urls[-1]) is None


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_run_of_agents_that_is_killed_goes_on_from_an_earlier_checkpoint(tmp_path, mode):
    save = tmp_path / "save"
    values = {"save": str(save), "load": str(save), "save_interval": 1, **mode}
    ran = run(tmp_path, **values)
    for later in sorted(save.glob("step_*"))[1:]:
        shutil.rmtree(later)
    assert run(tmp_path, **values).run_hash == ran.run_hash


@pytest.mark.parametrize("seed", range(2))
def test_a_free_run_of_agents_is_repeated_from_its_journal_on_another_clock(tmp_path, seed):
    values = {"rollout_max_response_len": 12, "max_staleness": 2}
    ran = Clock(seed, Acts, engines=2).run(tmp_path / "ran", **values)
    journal = journal_of(tmp_path / "ran")
    again = Clock(seed + 99, Acts).run(tmp_path / "again", replay=str(journal), **values)
    assert again.run_hash == ran.run_hash
    assert steps_of(journal_of(tmp_path / "again")) == steps_of(journal)


def interrupted(directory, **more):
    """The values of a free run that ended in its third rollout, with episodes under way."""
    save = str(directory / "save")
    values = {"save": save, "load": save, "save_interval": 1, "max_staleness": 3, **more}
    with pytest.raises(Interrupted):
        Clock(5, interrupted_at(2, Acts)).run(directory, **values)
    return values


class Speaks(Acts):
    """Its agent says something else each time."""

    @staticmethod
    def act(url, key, prompt):
        says(url, key, f"{next(said):b}".translate({48: "#", 49: "$"}))


def test_a_resumed_run_whose_agent_says_something_else_ends(tmp_path):
    values = interrupted(tmp_path)
    with pytest.raises(OtherTokensError, match=r"prompt \d.* as before"):
        Clock(6, Speaks).run(tmp_path, **values)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_what_clients_gave_up_before_a_kill_is_given_up_again(tmp_path, mode):
    save = tmp_path / "save"
    values = {"save": str(save), "load": str(save), "save_interval": 1, **mode}
    slow = Host()
    slow.pause = lambda: 0.005
    ran = run(tmp_path, slow, make_run=Leaves, **values)
    for later in sorted(save.glob("step_*"))[1:]:
        shutil.rmtree(later)
    observed = (tmp_path / "run" / "observations.jsonl").read_bytes()
    assert b'"value": ["' in observed
    assert run(tmp_path, make_run=Waits, **values).run_hash == ran.run_hash
    assert (tmp_path / "run" / "observations.jsonl").read_bytes() == observed


def test_what_clients_gave_up_in_a_free_run_is_given_up_in_its_replay(tmp_path):
    values = {"rollout_max_response_len": 12, "max_staleness": 2}
    slow = Clock(1, Leaves, engines=2)
    slow.host.pause = lambda: 0.005
    ran = slow.run(tmp_path / "ran", **values)
    assert b'"value": ["' in (tmp_path / "ran" / "run" / "observations.jsonl").read_bytes()
    journal = str(journal_of(tmp_path / "ran"))
    again = Clock(2, Waits).run(tmp_path / "again", replay=journal, **values)
    assert again.run_hash == ran.run_hash
