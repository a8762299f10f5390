"""Requests that begin together, against a server in memory; tests/e2e/test_server.py asks a real one."""

import asyncio
import base64
import json
import pickle
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest

from onpolicy.rollout import client as bursts
from onpolicy.rollout.client import Burst, EngineClient, EngineLostError
from tests.support.engines_in_memory import make_requests


class Server:
    """Answers each call with `chunks`, the next while `goes_on`; notes what came."""

    def __init__(self, *chunks, status=200):
        self.chunks, self.status = chunks, status
        self.calls, self.goes_on, self.is_left = [], asyncio.Event(), False
        self.goes_on.set()

    @asynccontextmanager
    async def __call__(self, requests):
        self.calls.append(requests)
        try:
            yield SimpleNamespace(
                status=self.status,
                content=SimpleNamespace(iter_any=self._chunks),
                json=self._json,
            )
        except asyncio.CancelledError:
            self.is_left = True
            raise

    async def _chunks(self):
        for chunk in self.chunks:
            yield chunk
            await self.goes_on.wait()

    async def _json(self):
        return self.chunks[0]


def payload(number, tokens=1):
    return {"input_ids": base64.b64encode(np.full(tokens, number, "<i4")).decode()}


def line(*places):
    return json.dumps([[place, 200, f"answer {place}"] for place in places]).encode() + b"\n"


def burst_to(server):
    return Burst(server, lambda _: None)


def started(burst, count):
    return [asyncio.create_task(burst.ask(payload(i))) for i in range(count)]


def test_requests_that_begin_together_are_one_call_and_each_gets_its_own_answer():
    async def run():
        server = Server(line(2, 0), line(1))
        answers = await asyncio.gather(*started(burst_to(server), 3))
        assert answers == [(200, f"answer {place}") for place in range(3)]
        assert server.calls == [[payload(0), payload(1), payload(2)]]

    asyncio.run(run())


def test_who_asks_within_a_moment_of_the_last_comes_along(monkeypatch):
    monkeypatch.setattr(bursts, "MOMENT", 0.05)

    async def run():
        server = Server(line(0, 1))
        burst = burst_to(server)
        (first,) = started(burst, 1)
        await asyncio.sleep(0.01)
        await burst.ask(payload(1))
        await first
        assert len(server.calls) == 1

    asyncio.run(run())


def test_a_call_is_made_in_the_end_however_many_go_on_asking(monkeypatch):
    monkeypatch.setattr(bursts, "MOMENT", 0)
    monkeypatch.setattr(bursts, "MOST_MOMENTS", 5)

    async def run():
        server = Server(line(*range(99)))
        burst, tasks = burst_to(server), []
        while not server.calls:
            tasks += started(burst, 1)
            await asyncio.sleep(0)
            assert len(tasks) < 99
        for task in tasks:
            task.cancel()

    asyncio.run(run())


def test_an_answer_is_there_before_the_last_of_its_call():
    async def run():
        server = Server(line(1), line(0))
        server.goes_on.clear()
        first, second = started(burst_to(server), 2)
        assert await second == (200, "answer 1")
        assert not first.done()
        server.goes_on.set()
        assert await first == (200, "answer 0")

    asyncio.run(run())


def test_a_line_may_come_in_pieces():
    async def run():
        whole = line(0) + line(1)
        server = Server(whole[:7], whole[7:9], whole[9:-3], whole[-3:])
        answers = await asyncio.gather(*started(burst_to(server), 2))
        assert answers == [(200, "answer 0"), (200, "answer 1")]

    asyncio.run(run())


def test_a_call_that_is_refused_is_refused_to_each():
    async def run():
        answers = await asyncio.gather(*started(burst_to(Server("why", status=400)), 2))
        assert answers == [(400, "why")] * 2

    asyncio.run(run())


def test_a_second_answer_to_a_request_fails_those_that_have_none():
    async def run():
        server = Server(line(0), line(0))
        answers = await asyncio.gather(*started(burst_to(server), 2), return_exceptions=True)
        assert answers[0] == (200, "answer 0")
        assert isinstance(answers[1], ValueError) and "request 0" in str(answers[1])

    asyncio.run(run())


def test_an_answer_that_breaks_off_fails_those_alone_that_have_none():
    async def run():
        answers = await asyncio.gather(
            *started(burst_to(Server(line(1))), 3), return_exceptions=True
        )
        assert answers[1] == (200, "answer 1")
        assert [type(answers[i]) for i in (0, 2)] == [aiohttp.ClientPayloadError] * 2

    asyncio.run(run())


def test_a_call_goes_on_for_those_who_wait_and_is_left_when_nobody_does():
    async def run():
        server = Server(line(2), line(1))
        server.goes_on.clear()
        first, second, third = started(burst_to(server), 3)
        await third
        first.cancel()
        await asyncio.sleep(0)
        server.goes_on.set()
        assert await second == (200, "answer 1") and not server.is_left

        server = Server(b"", line(0))
        server.goes_on.clear()
        tasks = started(burst_to(server), 2)
        while not server.calls:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert server.is_left

    asyncio.run(run())


class Session:
    """Counts the requests of each call to it; answers with a status."""

    def __init__(self, status):
        self.counts, self.status = [], status

    def post(self, url, *, json, headers, timeout):
        self.counts.append(len(json["requests"]))
        return Server({"error": "busy"}, status=self.status)(json["requests"])


def sent(session, client, requests):
    async def run():
        asked = (client.generate(session, request) for request in requests)
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(run())


def test_a_client_keeps_sessions_apart_and_nothing_of_a_call_that_was_made():
    """One session's request that is refused must not end those of another; ranks get clients pickled."""
    client, ours, theirs = EngineClient("http://e", "", 60.0, 60.0), Session(400), Session(400)

    async def run():
        requests = make_requests(5, seed=1)
        asked = [
            client.generate(ours if i < 3 else theirs, each) for i, each in enumerate(requests)
        ]
        await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(run())
    assert (ours.counts, theirs.counts) == ([3], [2])
    assert pickle.loads(pickle.dumps(client)).url == "http://e"


def test_what_a_server_reads_at_once_is_limited(monkeypatch):
    requests = make_requests(8, seed=1)
    monkeypatch.setattr(bursts, "MOST_TOKENS", len(requests[0].prompt_ids) + 1)
    session = Session(400)
    sent(session, EngineClient("http://e", "", 60.0, 60.0), requests)
    assert sum(session.counts) == 8 and max(session.counts) < 8


def test_requests_that_a_server_is_too_busy_for_are_sent_again_together(monkeypatch):
    monkeypatch.setattr("onpolicy.rollout.client._BACKOFF_SECONDS", 0.001)
    session = Session(503)
    answers = sent(session, EngineClient("http://e", "", 60.0, 60.0), make_requests(3, seed=1))
    assert session.counts == [3] * 4
    with pytest.raises(EngineLostError, match="no answer after 4 attempts"):
        raise answers[0]
