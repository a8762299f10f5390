"""Clients that send rubbish, leave, come back, flood, or use a dead key leave nothing behind."""

import asyncio
import json
import random

import aiohttp
import pytest
from openai import BadRequestError

from onpolicy.agents.gateway.fields import Fields
from onpolicy.agents.gateway.gateway_server import Gateway
from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.agents.gateway.protocols import chat_completions
from onpolicy.agents.gateway.refusals import RefusedError
from onpolicy.agents.gateway.session import SessionRules
from onpolicy.agents.gateway.session_rollouter import AgentRollouter, in_thread
from onpolicy.chat.template import ChatDriftError, Continuation, Drift
from onpolicy.errors import AgentError
from onpolicy.rollout.rollouter import Episode
from tests.support.acting import Draws, Says, SpelledOut, begin, decode, roll_out
from tests.support.clients import async_client_of

HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def rules(**more):
    return SessionRules(template=SpelledOut(), parser=AnswerParser(), **more)


def through(act, draws=None, **more):
    """The episode in which `act(post, opened, gateway)` acts; `post(body)` gives status and answer."""

    async def rolled(prompt, turns):
        gateway = Gateway(rules(**more))
        opened = await gateway.open(turns)
        headers = {"Authorization": f"Bearer {opened.api_key}"}
        try:
            async with aiohttp.ClientSession(headers=headers) as client:

                async def post(body, path="/chat/completions"):
                    given = {"data": body} if isinstance(body, bytes) else {"json": body}
                    async with client.post(opened.base_url + path, **given) as response:
                        return response.status, await response.json()

                await act(post, opened, gateway)
        finally:
            branches = await gateway.end(opened)
            assert gateway.num_sessions == 0
            await gateway.close()
        return Episode(trajectories=branches, reward=1.0)

    return roll_out(rolled, draws or Draws())


RUBBISH = [
    b"", b"{", b"[1]", b"null", b"\xff\xfe", b"NaN", b'{"model": NaN}', b'{"a": 1, "a": 2}',
    b"[" * 100_000, b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "policy", "messages": {"0": 1}}', b'{"model": 5}', b'{"messages": [null]}',
]  # fmt: skip


def test_rubbish_is_refused_and_the_session_goes_on():
    chance = random.Random(1)
    mutated = [bytes(chance.choices(range(256), k=chance.randint(1, 40))) for _ in range(50)]

    async def act(post, opened, gateway):
        for path in ("/chat/completions", "/completions", "/responses", "/messages"):
            for body in (*RUBBISH, *mutated):
                status, answer = await post(body, path)
                assert status == 400, (path, body, answer)
                assert answer["error"]["message"]
        assert (await post(HI))[0] == 200

    assert len(through(act).trajectories) == 1


def test_a_key_opens_one_session_and_dies_with_it():
    async def act(post, opened, gateway):
        other = await gateway.open(opened.session.turns.fork(key="other"))
        async with aiohttp.ClientSession() as client:

            async def status(base_url, key):
                headers = {"x-api-key": key}
                async with client.post(
                    f"{base_url}/chat/completions", json=HI, headers=headers
                ) as response:
                    return response.status

            assert await status(other.base_url, other.api_key) == 200
            assert await status(other.base_url, opened.api_key) == 401
            assert await status(opened.base_url, other.api_key) == 401
            assert await status(opened.base_url, "") == 401
            await gateway.end(other)
            assert await status(other.base_url, other.api_key) == 401
        assert (await post(HI))[0] == 200

    through(act)


def test_a_key_of_bytes_that_are_no_text_is_refused_as_any_other():
    async def act(post, opened, gateway):
        host, port = gateway.url.removeprefix("http://").split(":")
        path = opened.base_url.removeprefix(gateway.url)
        for key in (b"\x80\xff", b"\xc3\xa9", b"Bearer \xf0\x9f"):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\n"
            writer.write(head.encode() + b"Authorization: " + key + b"\r\n\r\n{}")
            status = await reader.readline()
            writer.close()
            assert status.split()[1] == b"401", (key, status)
        assert (await post(HI))[0] == 200

    through(act)


def test_a_session_that_ends_while_a_request_is_being_read_samples_nothing():
    async def act(post, opened, gateway):
        assert (await post(HI))[0] == 200
        await gateway.end(opened)
        call = chat_completions.read(Fields(HI))
        with pytest.raises(RefusedError, match="dies with it"):
            await opened.session.ask(call)

    assert len(through(act).branches) == 2


def test_sessions_may_end_while_their_gateway_closes():
    async def act(post, opened, gateway):
        assert (await post(HI))[0] == 200
        opens = [await gateway.open(opened.session.turns.fork(key=f"{i}")) for i in range(3)]
        await asyncio.gather(gateway.close(), *map(gateway.end, opens))

    through(act)


class Holds(Draws):
    """Answers when it is told to."""

    def __init__(self):
        super().__init__()
        self.held = []

    def asked(self, branch):
        self.held.append((branch, branch.ask))

    def answer(self):
        for branch, ask in self.held:
            self._answer(branch, ask)
        self.held.clear()


def test_an_answer_that_nobody_got_is_given_to_the_next_equal_request():
    draws, found = Holds(), []

    async def act(post, opened, gateway):
        leaving = asyncio.create_task(post(HI))
        await until(lambda: draws.held)
        leaving.cancel()
        await until(lambda: wanted(opened) == [False])
        again = asyncio.create_task(post(HI))
        await until(lambda: any(wanted(opened)))
        assert len(draws.held) == 1
        draws.answer()
        found.append((await again)[1]["id"])

    episode = through(act, draws)
    assert len(episode.trajectories) == len(episode.branches) - 1 == 1


def test_an_answer_that_nobody_got_is_not_learnt():
    draws = Holds()

    async def act(post, opened, gateway):
        leaving = asyncio.create_task(post(HI))
        await until(lambda: draws.held)
        leaving.cancel()
        await until(lambda: wanted(opened) == [False])
        draws.answer()
        staying = asyncio.create_task(post({**HI, "max_tokens": 3}))
        waiting = asyncio.create_task(post({**HI, "max_tokens": 4}))
        await until(lambda: len(draws.held) == 2)
        draws.held.sort(key=lambda held: held[1].params.max_new_tokens)
        draws.held, kept = draws.held[:1], draws.held[1:]
        draws.answer()
        await staying
        await gateway.end(opened)
        assert (await waiting)[0] == 401
        assert kept[0][0].ask is None

    episode = through(act, draws)
    (trajectory,) = episode.trajectories
    assert trajectory.num_sampled <= 3


async def until(holds):
    while not holds():
        await asyncio.sleep(0.005)


def wanted(opened):
    """Of each answer that was asked for in a session: whether its client is there."""
    return [each.is_wanted for equal in opened.session._asked.values() for each in equal]


def test_a_flood_is_held_back():
    draws = Holds()

    async def act(post, opened, gateway):
        flood = [asyncio.create_task(post({**HI, "max_tokens": 1 + i})) for i in range(50)]
        await until(lambda: sum(task.done() for task in flood) == 46)
        assert [task.result()[0] for task in flood if task.done()] == [429] * 46
        draws.answer()
        assert sorted(status for status, _ in await asyncio.gather(*flood))[:4] == [200] * 4

    assert len(through(act, draws, most_at_once=4).trajectories) == 4


def test_two_hundred_clients_that_leave_at_random_leave_nothing_behind():
    chance, left = random.Random(7), []

    async def client(gateway, turns, number):
        opened = await gateway.open(turns.fork(key=str(number)))
        headers = {"Authorization": f"Bearer {opened.api_key}"}
        try:
            async with aiohttp.ClientSession(headers=headers) as session:
                messages = [{"role": "user", "content": f"hi {number}"}]
                while chance.random() < 0.8:
                    body = {**HI, "messages": messages, "stream": chance.random() < 0.3}
                    asking = session.post(f"{opened.base_url}/chat/completions", json=body)
                    patience = chance.choice([None, None, 0.0001, 0.002, 0.01])
                    try:
                        async with asyncio.timeout(patience), asking as response:
                            if chance.random() < 0.2:
                                response.close()
                            elif not body["stream"]:
                                answer = await response.json()
                                messages = [*messages, answer["choices"][0]["message"]]
                    except (TimeoutError, aiohttp.ClientError):
                        messages = [*messages, {"role": "user", "content": "again"}]
        finally:
            left.extend(await gateway.end(opened))

    async def act(prompt, turns):
        gateway = Gateway(rules())
        before = asyncio.all_tasks()
        await asyncio.gather(*(client(gateway, turns, number) for number in range(200)))
        assert gateway.num_sessions == 0
        await gateway.close()
        await until(lambda: asyncio.all_tasks() <= before)
        assert not [b for b in turns.episode.branches.values() if b.ask is not None]
        return Episode(trajectories=left, reward=1.0)

    assert len(roll_out(act).trajectories) > 50


def agent_that_raises(base_url, api_key, prompt):
    raise KeyError("nothing")


def agent_that_says_rubbish(base_url, api_key, prompt):
    return "much"


def agent_that_samples_nothing(base_url, api_key, prompt):
    return 1.0


async def agent_that_asks(base_url, api_key, prompt):
    client = async_client_of(base_url, api_key)
    answer = (await client.chat.completions.create(**HI)).model_dump()
    return float(len(answer["choices"][0]["message"]["content"]))


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        (agent_that_raises, "KeyError: 'nothing'"),
        (agent_that_says_rubbish, "returned 'much'"),
        (agent_that_samples_nothing, "sampled"),
    ],
)
def test_an_agent_that_fails_is_a_failed_episode(agent, problem):
    with pytest.raises(AgentError, match=problem):
        roll_out(AgentRollouter(lambda: Gateway(rules()), in_thread(agent)))


def test_an_agent_acts_in_a_thread_and_its_reward_is_the_episodes():
    rollouter = AgentRollouter(lambda: Gateway(rules()), in_thread(agent_that_asks))
    draws = [Says(["abc"]) for _ in range(8)]
    episodes = [begin(rollouter, each, seed=seed) for seed, each in enumerate(draws)]
    for each, says in zip(episodes, draws, strict=True):
        assert says.ended_episodes.acquire(timeout=100)
        assert each.samples[0].reward == 3.0
        assert each.samples[0].metrics["gateway/num_answers"] == 1.0
        (trajectory,) = each.trajectories
        assert decode(trajectory.response_ids) == "abc<stop>"


@pytest.mark.parametrize(("change", "count"), [(str, 0), (" {}\n".format, 1)])
def test_a_chat_that_is_given_back_in_another_form_is_gone_on_with_and_counted(change, count):
    async def act(post, opened, gateway):
        _, answer = await post(HI)
        said = answer["choices"][0]["message"]
        messages = [*HI["messages"], {**said, "content": change(said["content"])}]
        for text in ("more", "and more"):
            messages.append({"role": "user", "content": text})
            _, answer = await post({**HI, "messages": messages})
            messages.append(answer["choices"][0]["message"])
        assert opened.session.num_loose_matches == count
        assert opened.session.metrics["gateway/num_loose_matches"] == count

    (trajectory,) = through(act, Says(["abc"])).trajectories
    assert decode(trajectory.response_ids) == "abc<stop>" * 3


class Refuses(SpelledOut):
    """A template that writes the past anew, where that is refused."""

    def go_on(self, token_ids, known, messages, tools):
        raise ChatDriftError("--chat-drift refuse: token 5")


def test_an_episode_whose_chat_drifts_fails_though_its_client_goes_on():
    async def agent(base_url, api_key, prompt):
        async with async_client_of(base_url, api_key) as client:
            answer = await client.chat.completions.create(**HI)
            said = answer.choices[0].message.model_dump(exclude_none=True)
            more = [*HI["messages"], said, {"role": "user", "content": "more"}]
            with pytest.raises(BadRequestError, match="--chat-drift refuse: token 5"):
                await client.chat.completions.create(model="policy", messages=more)
        return 1.0

    refusing = SessionRules(template=Refuses(), parser=AnswerParser())
    with pytest.raises(AgentError, match="--chat-drift refuse: token 5") as failed:
        roll_out(AgentRollouter(lambda: Gateway(refusing), in_thread(agent)))
    assert failed.value.reason == "drift"


class Rewrites(SpelledOut):
    """A template that writes the past anew at each turn."""

    def go_on(self, token_ids, known, messages, tools):
        whole = self.encode(f"!{json.dumps(messages)}")
        drift = Drift(token=2, had="er:hi", wants="!")
        return Continuation(kept=2, token_ids=whole, drift=drift)


def test_why_a_branch_began_is_kept_in_the_episode():
    async def agent(base_url, api_key, prompt):
        async with async_client_of(base_url, api_key) as client:
            answer = await client.chat.completions.create(**HI)
            said = answer.choices[0].message.model_dump(exclude_none=True)
            more = [*HI["messages"], said, {"role": "user", "content": "more"}]
            await client.chat.completions.create(model="policy", messages=more)
        return 1.0

    rewriting = SessionRules(template=Rewrites(), parser=AnswerParser())
    episode = roll_out(AgentRollouter(lambda: Gateway(rewriting), in_thread(agent)))
    ((branch, why),) = episode.samples[0].info["gateway/drifts"].items()
    assert why == "token 2: the chat has 'er:hi', and its template says '!'"
    assert branch in {key for each in episode.trajectories for key, _ in each.forks}
