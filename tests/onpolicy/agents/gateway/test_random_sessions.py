"""Whatever clients ask for: every token that is learnt was sampled, as it is, and is learnt once."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.agents.gateway.fields import Fields
from onpolicy.agents.gateway.parsing import Parsed
from onpolicy.agents.gateway.protocols import chat_completions, completions
from onpolicy.agents.gateway.refusals import RefusedError
from onpolicy.agents.gateway.session import Session, SessionRules
from onpolicy.chat.template import Continuation
from onpolicy.errors import AgentError
from onpolicy.rollout.rollouter import Episode
from tests.support.acting import Draws, SpelledOut, roll_out

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
WORDS = ['<add{"a":1}>', '<add{"a": 1, "b":2}>', "yes", "yes", "think)yes"]


class Forgetful(SpelledOut):
    """A template that drops what was thought in earlier turns, and writes arguments anew."""

    def _spelled(self, message):
        content = message["content"].rpartition(")")[2]
        return super()._spelled({**message, "content": content})

    def go_on(self, token_ids, known, messages, tools):
        whole = self.begin([*known, *messages], tools)
        pairs = enumerate(zip(token_ids, whole, strict=False))
        kept = next((i for i, (old, new) in pairs if old != new), min(len(token_ids), len(whole)))
        return Continuation(kept=kept, token_ids=whole[kept:])


class Calls:
    """Finds tool calls as the templates here write them."""

    tool_call_parser = "own"

    def reasoning(self):
        return "", "", False

    reads_harmony = False

    def parse(self, text, tools, held):
        if tools and text.startswith("<add{") and text.endswith("}>"):
            return Parsed(content="", calls=(("add", text[4:-1]),))
        return Parsed(content=text)


@dataclass
class Client:
    """Asks at random for what agents ask for."""

    session: Session
    chance: random.Random
    leaves: bool
    name: str
    replies: list = field(default_factory=list)
    got: list = field(default_factory=list)

    async def act(self, steps):
        for _ in range(steps):
            bodies = [self._body()]
            bodies *= self.chance.choice([1, 1, 1, 2, 3])
            answers = await asyncio.gather(*(self._ask(*body) for body in bodies))
            for (_, body), asked in zip(bodies, answers, strict=True):
                prompt = body.get("prompt", body.get("messages"))
                for each in asked:
                    turn = each.sampling.result()
                    self.replies.append((prompt, turn.reply))
                    self.got.append(turn)

    def _body(self):
        chance = self.chance
        if chance.random() < 0.2:
            prompt = chance.choice([f"ab{self.name}", *self._texts()]) + chance.choice("xyz")
            if chance.random() < 0.3:
                prompt = [ord(c) for c in prompt]
            return completions, {"model": "policy", "prompt": prompt, **self._options()}
        messages = list(chance.choice([[], [], *self._chats()]))
        if messages and chance.random() < 0.2:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + "!"}
        role = chance.choice(["user", "user", "system"])
        messages.append({"role": role, "content": self.name + chance.choice(["hi", "go", ""])})
        tools = {"tools": TOOLS} if chance.random() < 0.7 else {}
        return chat_completions, {
            "model": "policy", "messages": messages, **tools, **self._options()
        }  # fmt: skip

    def _texts(self):
        return [p + r.content for p, r in self.replies if isinstance(p, str)]

    def _chats(self):
        return [[*p, r.message] for p, r in self.replies if not isinstance(p, str)]

    def _options(self):
        chance, options = self.chance, {}
        if chance.random() < 0.2:
            options["n"] = chance.randint(2, 3)
        if chance.random() < 0.2:
            options["max_tokens"] = chance.randint(1, 4)
        if chance.random() < 0.2:
            options["stop"] = chance.choice(["e", ["b", "yz"]])
        if chance.random() < 0.05:
            options["top_p"] = 0.5
        return options

    async def _ask(self, protocol, body):
        try:
            call = protocol.read(Fields(body))
            asking = asyncio.ensure_future(self.session.ask(call))
            if self.leaves and self.chance.random() < 0.3:
                await asyncio.sleep(self.chance.choice([0, 0.001]))
                asking.cancel()
            return await asking
        except (RefusedError, asyncio.CancelledError):
            return []


def play(seed, *, names=("", ""), leaves=False, order=0):
    """A random session: the episode, what was sampled in it, and what clients got."""
    chance = random.Random(seed)
    draws = Draws(WORDS, random.Random(order))
    kept = {}

    async def act(prompt, turns):
        template = chance.choice([SpelledOut(), Forgetful()])
        session = Session(SessionRules(template=template, parser=Calls()), turns)
        clients = [Client(session, random.Random(chance.random()), leaves, name) for name in names]
        await asyncio.gather(*(client.act(chance.randint(1, 4)) for client in clients))
        late = asyncio.ensure_future(clients[0].act(1)) if leaves else None
        branches = await session.close()
        kept["got"] = [turn for client in clients for turn in client.got]
        if late is not None:
            late.cancel()
        return Episode(trajectories=branches, reward=1.0)

    try:
        return roll_out(act, draws), draws, kept["got"]
    except AgentError as error:
        assert error.reason == "result" and not kept["got"]
        return None, draws, []


def learnt(episode, draws):
    """(branch, position) of every token that is learnt; fails for one that was not sampled so."""
    found = Counter()
    for trajectory in episode.trajectories:
        starts = [0, *(length for _, length in trajectory.forks)]
        keys = tuple(key for key, _ in trajectory.forks)
        log_probs = iter(trajectory.rollout_log_probs)
        for position, is_sampled in enumerate(trajectory.sampled):
            if not is_sampled:
                continue
            depth = max(i for i, start in enumerate(starts) if start <= position)
            while depth and (keys[:depth], position) not in draws.positions:
                depth -= 1
            token, log_prob = draws.positions[keys[:depth], position]
            assert (token, log_prob) == (trajectory.token_ids[position], next(log_probs))
            found[keys[:depth], position] += 1
        assert next(log_probs, None) is None
    return found


def require_sound(episode, draws, got):
    """How many answers clients got; an episode in which they got none has failed."""
    if episode is None:
        return 0
    found = learnt(episode, draws)
    assert set(found.values()) <= {1}
    tokens = [trajectory.token_ids for trajectory in episode.trajectories]
    for turn in got:
        whole = [*turn.reply.prompt_ids, *turn.reply.token_ids]
        assert any(other[: len(whole)] == whole for other in tokens)
        begins = len(turn.reply.prompt_ids)
        for position in range(begins, len(whole)):
            assert found[turn.turns.key, position] == 1
    return len(got)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.runs) for i in range(1, 20))]
)
def test_in_ten_thousand_sessions_every_learnt_token_was_sampled_and_is_learnt_once(part):
    count = 0
    for seed in range(part, 10_000, 20):
        count += require_sound(*play(seed, leaves=seed % 3 == 0))
    assert count > 1_000


def test_a_mask_that_is_shifted_by_a_token_is_found():
    episode, draws, _ = play(5)
    (first, *_) = episode.trajectories
    first.sampled.array[:] = np.roll(first.sampled, 1)
    with pytest.raises((AssertionError, KeyError)):
        learnt(episode, draws)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(min_value=0), order=st.integers(min_value=1))
def test_no_order_of_arrivals_decides_a_token(seed, order):
    one, other = (play(seed, names="ab", order=each)[0] for each in (0, order))
    assert key_of(one) == key_of(other)


def key_of(episode):
    return sorted(
        (t.forks, t.token_ids, t.sampled, t.rollout_log_probs) for t in episode.trajectories
    )
