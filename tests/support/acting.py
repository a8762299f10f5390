"""Episodes whose policy is a function of the tokens and the seed: real branches, and no engine."""

import asyncio
import hashlib
import json
import random
import threading

import numpy as np

from onpolicy.chat.template import Continuation
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.rollouter import Rollouter
from onpolicy.rollout.turns import EpisodeRules
from onpolicy.trajectory import Completion, FinishReason, Span
from onpolicy.types import Prompt, Request, SamplingParams

STOP = 0
"""The token that ends an answer. Others are the code points of characters."""

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=400, stop_token_ids=(STOP,))
PROMPT = Prompt(index=0, prompt_ids=[ord(c) for c in "2+3="], label="5", text="2+3=")


def decode(token_ids):
    return "".join(chr(token) if token else "<stop>" for token in token_ids)


class SpelledOut:
    """A chat template whose tokens are characters: `role:content|` for each message."""

    vocab_size = 0x110000
    placer = None

    def begin(self, messages, tools):
        text = f"tools:{json.dumps(tools)}|" if tools else ""
        return self.encode(text + "".join(map(self._spelled, messages)) + "assistant:")

    def go_on(self, token_ids, known, messages, tools):
        more = "".join(map(self._spelled, messages)) + "assistant:"
        more = self.encode(more if token_ids[-1] == STOP else f"|{more}")
        return Continuation(kept=len(token_ids), token_ids=more)

    def encode(self, text):
        return [ord(character) for character in text]

    begin_text = encode

    def placed(self, token_ids, images, start=0):
        return ()

    def _spelled(self, message):
        if message["role"] == "forbidden":
            raise ValueError("no such role")
        calls = "".join(
            f"<{call['function']['name']}{call['function']['arguments']}>"
            for call in message.get("tool_calls", ())
        )
        return f"{message['role']}:{message['content']}{calls}|"


class Draws:
    """Answers what episodes ask for, in an order of its own, by a function of the tokens and the seed;
    with luck one of `words`."""

    stop = STOP

    def __init__(self, words=(), order=None):
        self.words, self.order = list(words), order or random.Random(0)
        self.positions = {}
        """(branch, position): the token that was sampled there, and its log-probability."""

        self.ended_episodes = threading.Semaphore(0)

    def asked(self, branch):
        self._later(self.order.choice([0, 0, 1, 5, 20]), branch, branch.ask)

    def _later(self, rounds, branch, ask):
        """After so many rounds of the event loop."""
        step = (self._later, rounds - 1) if rounds else (self._answer,)
        asyncio.get_running_loop().call_soon(*step, branch, ask)

    def text(self, chance):
        """What is sampled, before the token that stops."""
        return chance.choice(
            [*self.words, "".join(chance.choices("abc xyz", k=chance.randint(0, 6)))]
        )

    def encode(self, text):
        return [*map(ord, text)]

    def _answer(self, branch, ask):
        if ask is None or branch.ask is not ask:
            return
        request = branch.episode.request(branch, ask)
        begins = len(request.prompt_ids)
        digest = hashlib.blake2b(
            repr((request.prompt_ids, request.sampling_seed)).encode()
        ).digest()
        chance = random.Random(digest)
        token_ids = [*self.encode(self.text(chance)), self.stop][: request.params.max_new_tokens]
        log_probs = [-float(np.float32(chance.random())) for _ in token_ids]
        for stop in request.params.stop:
            if (at := decode(token_ids).find(stop)) >= 0:
                token_ids = token_ids[: at + len(stop)]
                log_probs = log_probs[: len(token_ids)]
        for position, drawn_here in enumerate(zip(token_ids, log_probs, strict=True), begins):
            assert (branch.key, position) not in self.positions
            self.positions[branch.key, position] = drawn_here
        is_cut = token_ids[-1] != self.stop and not any(
            map(decode(token_ids).endswith, request.params.stop)
        )
        branch.episode.add(
            branch,
            ask,
            Completion(
                response_ids=token_ids,
                rollout_log_probs=log_probs,
                finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
                weight_version=0,
                num_cached_tokens=0,
                spans=(Span(version=0, start=0, end=len(token_ids)),),
            ),
        )

    def ended(self, episode):
        self.ended_episodes.release()


class Says(Draws):
    """Answers with one text after the other, and with the last for ever."""

    def text(self, chance):
        return self.words.pop(0) if len(self.words) > 1 else self.words[0]


class Acts(Rollouter):
    def __init__(self, act):
        self.act = act

    async def roll_out(self, prompt, turns):
        return await self.act(prompt, turns)


def begin(
    rollouter, draws, *, seed=3, params=PARAMS, max_context_len=100_000, prompt=PROMPT,
    decode=decode, **more
):  # fmt: skip
    """An episode under way; `more` of its rules."""
    request = Request(prompt_ids=prompt.prompt_ids, sampling_seed=seed, params=params)
    rules = EpisodeRules(max_context_len=max_context_len, decode=decode, **more)
    episode = OpenEpisode(rollouter, prompt, request, rules)
    episode.go_on(draws)
    return episode


def roll_out(act, draws=None, **more):
    """An episode by `act(prompt, turns)`, once it is complete. Raises what it raised."""
    draws = draws or Draws()
    rollouter = act if isinstance(act, Rollouter) else Acts(act)
    episode = begin(rollouter, draws, **more)
    assert draws.ended_episodes.acquire(timeout=100)
    if episode.error is not None:
        raise episode.error
    return episode
