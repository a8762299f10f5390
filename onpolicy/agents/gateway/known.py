"""Sampled answers of a session, and the search for the one that a new request continues.

An answer may still be sampled: `Asked` is one that a client waits for, has received, or gave up.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onpolicy.agents.gateway.calls import Call, Message, Reply
from onpolicy.rollout.rollouter import Turns


class KnownTurns:
    """The answers of a session. `same`: gives the part of a message that must be equal."""

    def __init__(self, same: Callable[[Message], Any]):
        self._same = same
        self._after = defaultdict[str, list[KnownTurn]](list)
        self._all: list[KnownTurn] = []
        self.named: dict[str, KnownTurn] = {}

    def add(self, turn: KnownTurn) -> None:
        """Add an answer."""
        self._all.append(turn)
        self.named[turn.reply.name] = turn
        if turn.call.prompt is None:
            *_, last = self._digests(turn.messages, turn.call.tools)
            self._after[last].append(turn)

    def before(self, call: Call) -> list[KnownTurn]:
        """Return the deepest turns that a request continues; several, where answers are equal."""
        if call.prompt is not None:
            return self._before_prompt(call.prompt)
        for digest in reversed(list(self._digests(call.messages, call.tools))):
            if found := self._after.get(digest):
                return found
        return []

    def _digests(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> Iterator[str]:
        """Yield the digests of the beginnings of a chat, from one message on."""
        digest = digest_of(tools)
        for message in messages:
            digest = digest_of(digest, self._same(message))
            yield digest

    def _before_prompt(self, prompt: str | tuple[int, ...]) -> list[KnownTurn]:
        if isinstance(prompt, str):
            fits = [t for t in self._all if t.text is not None and prompt.startswith(t.text)]
        else:
            known = [(t, t.turns.trajectory.token_ids) for t in self._all]
            fits = [t for t, token_ids in known if [*prompt[: len(token_ids)]] == token_ids]
        depth = max((turn.num_tokens for turn in fits), default=0)
        return [turn for turn in fits if turn.num_tokens == depth]


@dataclass(slots=True, kw_only=True, eq=False)
class KnownTurn:
    """An answer of the policy, and everything before it."""

    turns: Turns
    """The branch, which ends with the answer and never goes on: continuations are on forks."""

    call: Call
    """The call, with its chat from the beginning."""

    digest: str
    """The digest of the request; equal for equal requests."""

    number: int
    """The index among equal requests."""

    reply: Reply
    parent: KnownTurn | None
    num_shared: int
    """The number of tokens that its branch shares with its parent's."""

    def order(self) -> tuple[str, int]:
        """Return the sort key: the first of equal answers is continued."""
        return self.digest, self.number

    @property
    def messages(self) -> tuple[Message, ...]:
        """The chat with the answer."""
        return (*self.call.messages, self.reply.message)

    @property
    def text(self) -> str | None:
        """The prompt and answer, where the prompt was text."""
        prompt = self.call.prompt
        return prompt + self.reply.content if isinstance(prompt, str) else None

    @property
    def num_tokens(self) -> int:
        """The number of tokens, given and sampled."""
        return len(self.turns.trajectory.token_ids)

    def covered(self) -> Iterator[KnownTurn]:
        """Yield the earlier turns whose tokens this turn contains completely."""
        turn = self
        while turn.parent is not None and turn.num_shared == turn.parent.num_tokens:
            turn = turn.parent
            yield turn


@dataclass(slots=True, eq=False)
class Asked:
    """One requested answer. It is sampled to its end, whether or not its client waits for it: if a
    client's leaving stopped it, its length would depend on the clock."""

    sampling: asyncio.Task[KnownTurn]

    is_wanted: bool = True
    """Whether a client waits for it or has received it. If not, the next equal request gets it."""

    @property
    def turn(self) -> KnownTurn | None:
        """The answer, if there is one."""
        task = self.sampling
        is_there = task.done() and not task.cancelled() and task.exception() is None
        return task.result() if is_there else None

    @property
    def is_left(self) -> bool:
        """Whether the next equal request gets it."""
        return not self.is_wanted and (not self.sampling.done() or self.turn is not None)


def digest_of(*parts: Any) -> str:
    """Return 32 hex digits that identify values which JSON can hold, and images that were read."""
    text = json.dumps(parts, sort_keys=True, default=lambda image: image.digest)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
