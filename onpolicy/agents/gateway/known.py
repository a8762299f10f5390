"""What a session knows: every answer that was sampled in it, and where a new request goes on."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onpolicy.agents.gateway.calls import Call, Message, Reply
from onpolicy.rollout.episodes import Turns


def digest_of(*parts: Any) -> str:
    """32 hex digits of what JSON can say."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(slots=True, kw_only=True, eq=False)
class KnownTurn:
    """An answer of the policy, and all that came before it."""

    turns: Turns
    """The branch, which ends with it and never goes on: what comes after it is on forks."""

    call: Call
    """What was asked for, with its chat from the beginning."""

    digest: str
    """Equal for requests that ask for the same."""

    number: int
    """Among those."""

    reply: Reply
    parent: KnownTurn | None
    num_shared: int
    """Tokens that its branch has from its parent's."""

    def order(self) -> tuple[str, int]:
        """What they are sorted by: the first of equal answers is continued."""
        return self.digest, self.number

    @property
    def messages(self) -> tuple[Message, ...]:
        """The chat with the answer."""
        return (*self.call.messages, self.reply.message)

    @property
    def text(self) -> str | None:
        """Prompt and answer, where the prompt was text."""
        prompt = self.call.prompt
        return prompt + self.reply.content if isinstance(prompt, str) else None

    @property
    def num_tokens(self) -> int:
        """Given and sampled."""
        return len(self.turns.trajectory.token_ids)

    def covered(self) -> Iterator[KnownTurn]:
        """The turns before it whose tokens it has all."""
        turn = self
        while turn.parent is not None and turn.num_shared == turn.parent.num_tokens:
            turn = turn.parent
            yield turn


class KnownTurns:
    """All answers of a session. `same`: what of a message has to be equal."""

    def __init__(self, same: Callable[[Message], Any]):
        self._same = same
        self._after = defaultdict[str, list[KnownTurn]](list)
        self._all: list[KnownTurn] = []
        self.named: dict[str, KnownTurn] = {}

    def add(self, turn: KnownTurn) -> None:
        """Know one more."""
        self._all.append(turn)
        self.named[turn.reply.name] = turn
        if turn.call.prompt is None:
            *_, last = self._digests(turn.messages, turn.call.tools)
            self._after[last].append(turn)

    def before(self, call: Call) -> list[KnownTurn]:
        """The deepest turns that a request continues; several, where answers are equal."""
        if call.prompt is not None:
            return self._before_prompt(call.prompt)
        for digest in reversed(list(self._digests(call.messages, call.tools))):
            if found := self._after.get(digest):
                return found
        return []

    def _digests(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> Iterator[str]:
        """The digests of the beginnings of a chat, from one message on."""
        digest = digest_of(tools)
        for message in messages:
            digest = digest_of(digest, self._same(message))
            yield digest

    def _before_prompt(self, prompt: str | tuple[int, ...]) -> list[KnownTurn]:
        if isinstance(prompt, str):
            fits = [t for t in self._all if t.text is not None and prompt.startswith(t.text)]
        else:
            fits = [t for t in self._all if _begins_with(prompt, t.turns.trajectory.token_ids)]
        depth = max((turn.num_tokens for turn in fits), default=0)
        return [turn for turn in fits if turn.num_tokens == depth]


def _begins_with(prompt: tuple[int, ...], token_ids: Sequence[int]) -> bool:
    return len(prompt) >= len(token_ids) and list(prompt[: len(token_ids)]) == token_ids
