"""Sessions without a run: who may open them, what comes of them, and when they end."""

import asyncio
import threading
import time
from contextlib import contextmanager

import pytest
import requests
from openai import APITimeoutError, InternalServerError

from onpolicy.agents.gateway.gateway_server import Gateway
from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.agents.gateway.session import SessionRules
from onpolicy.rollout.client import EngineLostError
from onpolicy.rollout.turns import EpisodeRules
from onpolicy.run.commands.served_engines import ServedSessions
from onpolicy.system.records import Shape
from onpolicy.trajectory import Completion, FinishReason, Trajectory
from tests.support.acting import PARAMS, STOP, SpelledOut, decode
from tests.support.clients import client_of

KEY = {"Authorization": "Bearer the servers' own"}
HI = {"role": "user", "content": "hi"}
HANGS = 300
"""Seconds after which an answer will not come."""


class Engine:
    """Answers with the last three characters that it reads; or is lost."""

    is_lost = False

    async def generate(self, connection, request):
        if self.is_lost:
            raise EngineLostError("the engine is gone.")
        token_ids = [*request.prompt_ids[-3:], STOP][: request.params.max_new_tokens]
        has_stopped = token_ids[-1] == STOP
        return Completion(
            response_ids=token_ids,
            rollout_log_probs=[-0.5] * len(token_ids),
            finish_reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
            weight_version=0,
            num_cached_tokens=0,
        )


@contextmanager
def served(*engines, time_limit=100.0):
    """The URL at which sessions are opened, while they are served."""
    sessions = ServedSessions(
        Gateway(SessionRules(template=SpelledOut(), parser=AnswerParser())),
        engines or [Engine()],
        api_keys=(KEY["Authorization"].removeprefix("Bearer "), "that-of-runs"),
        params=PARAMS,
        rules=EpisodeRules(max_context_len=1000, on_failure="drop", decode=decode),
        seed=0,
        time_limit=time_limit,
    )
    sessions.start()
    try:
        yield f"{sessions.gateway.url}/sessions"
    finally:
        sessions.close()


def opened(url):
    answer = requests.post(url, headers=KEY, timeout=HANGS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ended(url, session):
    return requests.delete(f"{url}/{session['id']}", headers=KEY, timeout=HANGS)


def client_to(session):
    return client_of(session["base_url"], session["api_key"])


def test_a_client_acts_in_a_session_and_its_trajectories_are_returned_when_it_ends():
    with served() as url:
        session = opened(url)
        with client_to(session) as client:
            ask = client.chat.completions.create
            said = ask(model="policy", messages=[HI]).choices[0].message.model_dump()
            ask(model="policy", messages=[HI, said, {"role": "user", "content": "more"}], n=2)
            answer = ended(url, session)
            assert answer.json() == ended(url, session).json()
        found = answer.json()
        assert found["metrics"]["gateway/num_answers"] == 3 and not found["failures"]
        first, second = found["trajectories"]
        assert first["turns"] == [
            {"sampled": False, "text": "user:hi|assistant:"},
            {"sampled": True, "text": "nt:<stop>"},
            {"sampled": False, "text": "user:more|assistant:"},
            {"sampled": True, "text": "nt:<stop>"},
        ]
        for turns in (first.pop("turns"), second.pop("turns")):
            assert "".join(turn["text"] for turn in turns)
        of_both = [Shape(Trajectory).take(each) for each in (first, second)]
        assert [each.num_sampled for each in of_both] == [8, 4]
        dead = requests.get(
            f"{session['base_url']}/models",
            headers={"Authorization": f"Bearer {session['api_key']}"},
            timeout=HANGS,
        )
        assert dead.status_code == 401


def test_sessions_are_opened_and_ended_with_the_key_of_the_servers_alone():
    with served() as url:
        session = opened(url)
        no_text = (b"Bearer \xff\xfe", "Bearer \u00e9")
        for key in ("", session["api_key"], KEY["Authorization"][:-1], *no_text):
            wrong = {"Authorization": key}
            assert requests.post(url, headers=wrong, timeout=HANGS).status_code == 401
            at = f"{url}/{session['id']}"
            assert requests.delete(at, headers=wrong, timeout=HANGS).status_code == 401
        runs = {"Authorization": "Bearer that-of-runs"}
        assert requests.post(url, headers=runs, timeout=HANGS).status_code == 200
        unknown = requests.delete(f"{url}/other", headers=KEY, timeout=HANGS)
        assert unknown.status_code == 404 and "no session 'other'" in unknown.text


def test_a_session_that_nobody_ends_ends_by_itself_and_is_forgotten_later():
    with served(time_limit=0.5) as url:
        session = opened(url)
        with client_to(session) as client:
            client.completions.create(model="policy", prompt="abc")
            models = f"{session['base_url']}/models"
            key = {"Authorization": f"Bearer {session['api_key']}"}
            while requests.get(models, headers=key, timeout=HANGS).status_code == 200:
                time.sleep(0.05)
        while (answer := ended(url, session)).status_code == 200:
            assert len(answer.json()["trajectories"]) == 1
            time.sleep(0.05)
        assert answer.status_code == 404


def test_nothing_is_left_of_sessions_whose_server_stops():
    with served() as url:
        session = opened(url)
    with pytest.raises(requests.ConnectionError):
        ended(url, session)


def test_a_client_is_told_that_its_engine_is_gone_and_sessions_take_turns():
    lost = Engine()
    lost.is_lost = True
    with served(Engine(), lost) as url:
        first, second, third = (opened(url) for _ in range(3))
        for session in (first, third):
            with client_to(session) as client:
                client.chat.completions.create(model="policy", messages=[HI])
        gone = pytest.raises(InternalServerError, match="the engine is gone")
        with client_to(second) as client, gone:
            client.chat.completions.create(model="policy", messages=[HI])
        found = ended(url, second).json()
        assert found["trajectories"] == [] and "anything sampled" in found["failures"][0]


def test_sessions_go_on_after_one_that_ended_before_anything_was_sampled():
    with served() as url:
        empty = ended(url, opened(url)).json()
        assert empty["trajectories"] == [] and "anything sampled" in empty["failures"][0]
        session = opened(url)
        with client_to(session) as client:
            client.chat.completions.create(model="policy", messages=[HI])
        found = ended(url, session).json()
        assert len(found["trajectories"]) == 1 and not found["failures"]


class Holds(Engine):
    """Answers when it is told to."""

    def __init__(self):
        self.asked, self.may_answer = threading.Event(), threading.Event()

    async def generate(self, connection, request):
        self.asked.set()
        while not self.may_answer.is_set():
            await asyncio.sleep(0.01)
        return await super().generate(connection, request)


def test_what_a_client_left_in_one_session_is_learnt_in_the_next():
    holds = Holds()
    with served(holds, Engine()) as url:
        left, kept = opened(url), opened(url)
        with client_to(left) as client, pytest.raises(APITimeoutError):
            client.with_options(timeout=0.5, max_retries=0).chat.completions.create(
                model="policy", messages=[HI]
            )
        assert holds.asked.wait(HANGS)
        holds.may_answer.set()
        with client_to(left) as client:
            client.completions.create(model="policy", prompt="abc")
        assert len(ended(url, left).json()["trajectories"]) == 1
        with client_to(kept) as client:
            client.chat.completions.create(model="policy", messages=[HI])
        found = ended(url, kept).json()
        assert len(found["trajectories"]) == 1 and not found["failures"]
        assert found["metrics"]["gateway/num_given_up"] == 0


class Stumbles(Engine):
    """Raises what no engine is known to raise."""

    async def generate(self, connection, request):
        raise KeyError("meta_info")


def test_an_error_of_any_kind_is_told_to_the_client_that_waits():
    told = pytest.raises(InternalServerError, match="KeyError")
    with served(Stumbles()) as url, client_to(opened(url)) as client, told:
        client.chat.completions.create(model="policy", messages=[HI])


def test_a_session_that_cannot_be_opened_is_an_error_and_no_wait(monkeypatch):
    async def full(gateway, turns):
        raise OSError("no room")

    with served() as url:
        with monkeypatch.context() as context:
            context.setattr(Gateway, "open", full)
            refused = requests.post(url, headers=KEY, timeout=HANGS)
        assert refused.status_code == 500 and "no room" in refused.json()["error"]["message"]
        assert ended(url, opened(url)).status_code == 200
