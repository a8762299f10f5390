"""Whole runs of an agent that acts through the gateway have one hash."""

import contextlib
from functools import partial

import openai
import pytest

from onpolicy.agents.chat import ChatTemplate
from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.agents.gateway.rollouter import AgentRollouter, in_thread
from onpolicy.agents.gateway.server import Gateway
from onpolicy.agents.gateway.session import SessionRules
from onpolicy.run.run import Run
from tests.support.engines_in_memory import Host
from tests.support.run_in_memory import even_tokens, run_in_memory, samples_of
from tests.support.tiny import make_tokenizer
from tests.support.tiny_policy import END

pytestmark = pytest.mark.usefixtures("undrawn")

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% else %}%{% endif %}{% endfor %}"
)


def agent(base_url, api_key, prompt):
    """A chat of two turns, of which the second is begun twice at once."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": "#$%&"[: 1 + prompt.index % 4]}]
        ask = partial(client.chat.completions.create, model="policy", max_tokens=4)
        message = ask(messages=messages).choices[0].message
        messages += [message, {"role": "user", "content": "*" if message.content else ")"}]
        ask(messages=messages, n=2)


def leaves(base_url, api_key, prompt):
    """Asks for something that it does not wait for, and then acts."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, timeout=0.01, max_retries=0)
    with client, contextlib.suppress(openai.APITimeoutError):
        messages = [{"role": "user", "content": "("}]
        client.chat.completions.create(model="policy", messages=messages)
    agent(base_url, api_key, prompt)


def make_gateway():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    template = ChatTemplate(tokenizer, (END,))
    return Gateway(SessionRules(template=template, parser=AnswerParser()))


def run(directory, host=None, act=agent, **values):
    rollouter = AgentRollouter(make_gateway, in_thread(act))
    make_run = partial(Run, rollouter=rollouter)
    values = {"rollout_max_response_len": 12, "eval_interval": None, **values}
    return run_in_memory(directory, host or Host(), even_tokens, make_run=make_run, **values)


@pytest.mark.parametrize("mode", [{}, {"rollout_segment_tokens": 3}], ids=["lag 0", "segments"])
def test_no_engine_and_no_arrival_decides_the_hash_of_a_run_of_agents(tmp_path, mode):
    ran = run(tmp_path / "one", **mode)
    assert ran.totals.num_mismatched_tokens == 0 < ran.totals.num_compared_tokens
    dying = Host({9}, {14})
    more = run(tmp_path / "two", dying, rollout_num_engines=2, **mode)
    assert more.run_hash == ran.run_hash and dying.num_restarts
    of_both = [samples_of(tmp_path / name, "rollout_000003") for name in ("one", "two")]
    assert of_both[0] == of_both[1]


@pytest.mark.parametrize("mode", [{}, {"rollout_segment_tokens": 3}], ids=["lag 0", "segments"])
def test_a_run_whose_agents_give_answers_up_ends(tmp_path, mode):
    ran = run(tmp_path, act=leaves, **mode)
    assert ran.totals.num_mismatched_tokens == 0 < ran.totals.num_compared_tokens
