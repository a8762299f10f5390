"""Session: an episode in which clients act; each answer is sampled on a branch of its own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onpolicy.agents.gateway.calls import Call, Message, UnreadImage
from onpolicy.agents.gateway.constraints import held_to
from onpolicy.agents.gateway.known import Asked, KnownTurn, KnownTurns, digest_of
from onpolicy.agents.gateway.parsing import AnswerParser, make_reply
from onpolicy.agents.gateway.refusals import RefusedError, invalid, session_is_over
from onpolicy.chat.messages import exactly, images_of, loosely, said_of_image, seen
from onpolicy.chat.template import ChatDriftError, ChatTemplate
from onpolicy.images.placed import PlacedImage
from onpolicy.images.placing import SeenImage
from onpolicy.rollout.results import order_of
from onpolicy.rollout.rollouter import ContextExceededError, Turns

Place = tuple[KnownTurn | None, int, list[int], Sequence[PlacedImage]]
"""(the turn that an answer continues, how many of its tokens are kept, the tokens after them, images
among these)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """The rules for all sessions of a gateway."""

    template: ChatTemplate
    same: Callable[[Message], Any] = loosely
    """A function of a message: the part that must be equal when a client sends it back."""

    parser: AnswerParser
    model_name: str = "policy"

    most_at_once: int = 64
    """The most answers of one session that are sampled at the same time."""


class Session:
    """A session whose answers are on branches of `turns`, keyed by a digest of the whole request
    and an index among equal requests: so no seed depends on the order of arrivals."""

    def __init__(self, rules: SessionRules, turns: Turns):
        self.rules, self.turns = rules, turns
        self.num_refused = 0
        """Requests that were answered with an error."""

        self.num_given_up = 0
        """Answers that no client received, counted when the session is closed."""

        self.refused_drift: ChatDriftError | None = None
        """The drift that the chat template's rule refused: the episode fails."""

        self.num_drifts = 0
        """Requests whose past the chat template rewrites."""

        self.num_loose_matches = 0
        """Requests that send an earlier chat back with the same meaning, but changed."""

        self.drifts: dict[str, str] = {}
        """The place and form of each drift of the chat template, by the branch beside it."""

        self._is_over = False
        self._known = KnownTurns(rules.same)
        self._asked = defaultdict[str, list[Asked]](list)

    async def ask(self, call: Call) -> list[Asked]:
        """Return the answers to a call; if it is cancelled, keep them for the next equal one.

        Raises RefusedError.
        """
        self._require(call)
        call = self._seen(call)
        digest = digest_of(*call.decisive)
        equal = self._asked[digest]
        asked = [each for each in equal if each.is_left][: call.num_answers]
        for each in asked:
            each.is_wanted = True
        while len(asked) < call.num_answers:
            sampling = asyncio.create_task(self._sample(call, digest, len(equal)))
            sampling.add_done_callback(_seen)
            asked.append(Asked(sampling))
            equal.append(asked[-1])
        try:
            await asyncio.wait([each.sampling for each in asked])
            for each in asked:
                if each.sampling.cancelled():
                    raise session_is_over()
                each.sampling.result()
        except BaseException:
            self.give_up(asked)
            raise
        return asked

    def give_up(self, asked: Sequence[Asked]) -> None:
        """Mark answers that their client did not receive."""
        for each in asked:
            each.is_wanted = False

    async def settle(self) -> None:
        """End the agent's part: answers that clients received by now are learnt, and no later ones.

        Since the moment at which a client gives up depends on the clock, this is an observation: a
        repeated episode waits for the answers that were received before, and leaves out the others.
        """
        self._is_over = True
        asked = {
            f"{digest}.{number}": each
            for digest, equal in self._asked.items()
            for number, each in enumerate(equal)
        }

        async def not_got() -> list[str]:
            return sorted(
                key for key, each in asked.items() if not each.is_wanted or each.turn is None
            )

        missed = await self.turns.observe(not_got)
        for key, each in asked.items():
            each.is_wanted = key not in missed
        got = [each.sampling for each in asked.values() if each.is_wanted]
        await asyncio.gather(*got, return_exceptions=True)

    async def close(self) -> list[Turns]:
        """End the session and its sampling; return the branches that clients received."""
        self._is_over = True
        asked = [each for equal in self._asked.values() for each in equal]
        for each in asked:
            each.sampling.cancel()
        await asyncio.gather(*(each.sampling for each in asked), return_exceptions=True)
        got = [each.turn for each in asked if each.is_wanted and each.turn is not None]
        self.num_given_up = sum(not each.is_wanted and each.turn is not None for each in asked)
        covered = {id(before) for turn in got for before in turn.covered()}
        kept = [turn.turns for turn in got if id(turn) not in covered]
        return sorted(kept, key=lambda branch: order_of(branch.key))

    @property
    def metrics(self) -> dict[str, float]:
        """The session's metrics for its episode, once it is closed."""
        asked = sum(map(len, self._asked.values()))
        return {
            "gateway/num_answers": float(asked),
            "gateway/num_given_up": float(self.num_given_up),
            "gateway/num_refused": float(self.num_refused),
            "gateway/num_drifts": float(self.num_drifts),
            "gateway/num_loose_matches": float(self.num_loose_matches),
        }

    def _require(self, call: Call) -> None:
        if self._is_over:  # while the request was being read
            raise session_is_over()
        rules = self.rules
        self._require_model(call)
        if call.tools and not rules.parser.tool_call_parser:
            raise invalid(
                "tools", "this run understands no tool calls. Start it with --tool-call-parser."
            )
        held_to(call, rules.parser, self.turns)
        under_way = sum(not a.sampling.done() for equal in self._asked.values() for a in equal)
        if under_way + call.num_answers > rules.most_at_once:
            raise RefusedError(
                429,
                f"Rate limit reached: {under_way} answers of this session are being sampled, "
                f"{call.num_answers} more are asked for, and {rules.most_at_once} may be at once.",
                code="rate_limit_exceeded",
            )

    def _require_model(self, call: Call) -> None:
        if call.model != (name := self.rules.model_name):
            message = f"The model {call.model!r} does not exist: there is {name!r} alone."
            raise RefusedError(404, message, code="model_not_found", field="model")

    def _seen(self, call: Call) -> Call:
        """Return the call with its images read. Raises RefusedError."""
        placer = self.rules.template.placer

        def see(said: dict[str, Any]) -> SeenImage:
            unread: UnreadImage = said["image"]
            if placer is None:
                kind = unread.said["type"]
                raise invalid(
                    unread.where, f"{kind!r}: without --images the policy reads text alone."
                )
            try:
                return placer.see(said_of_image(unread.said))
            except ValueError as error:
                raise invalid(unread.where.removesuffix(".type"), f"{error}.") from error

        return replace(
            call,
            messages=tuple(
                {**message, "content": seen(message["content"], see)} for message in call.messages
            ),
        )

    async def _sample(self, call: Call, digest: str, number: int) -> KnownTurn:
        call = self._with_earlier(call)
        key = f"{digest}.{number}"
        parent, length, token_ids, images = self._place(call, await self._before(call), key)
        origin = self.turns if parent is None else parent.turns
        branch = origin.fork(length, key=key)
        try:
            branch.insert(token_ids, images)
            if not branch.num_left:
                raise ContextExceededError("--rollout-max-response-len is used up")
            prompt_ids = branch.trajectory.token_ids
            held = held_to(call, self.rules.parser, self.turns, prompt_ids)
            answer = await branch.sample(
                stop=call.stop,
                max_tokens=call.max_tokens,
                temperature=call.temperature,
                grammar=held.grammar,
            )
        except ContextExceededError as error:
            message = f"This model's maximum context length is exceeded: {error}."
            code = "context_length_exceeded"
            raise RefusedError(400, message, code=code, field="messages") from error
        reply = make_reply(call, branch, prompt_ids, answer, self.rules.parser, held)
        turn = KnownTurn(
            turns=branch, call=call, digest=digest, number=number, reply=reply, parent=parent,
            num_shared=length,
        )  # fmt: skip
        self._known.add(turn)
        return turn

    def _with_earlier(self, call: Call) -> Call:
        """Return the call with its chat from the beginning."""
        if not call.continues:
            return call
        if (before := self._known.named.get(call.continues)) is None:
            message = f"Previous response with id 'resp_{call.continues}' not found."
            code = "previous_response_not_found"
            raise RefusedError(404, message, code=code, field="previous_response_id")
        return replace(call, messages=(*before.messages, *call.messages))

    async def _before(self, call: Call) -> KnownTurn | None:
        """Return the turn that a call continues: the first of equal ones, even if under way."""
        if not (found := self._known.before(call)):
            return None
        first = min(found, key=KnownTurn.order)
        earlier = [each.sampling for each in self._asked[first.digest][: first.number]]
        if earlier:
            await asyncio.wait(earlier)
        return min(self._known.before(call), key=KnownTurn.order)

    def count(self, call: Call) -> int:
        """Return the number of tokens of a new chat. Raises RefusedError."""
        self._require_model(call)
        call = self._seen(call)
        try:
            return len(self.rules.template.begin(call.messages, call.tools))
        except ValueError as error:
            raise invalid("messages", f"the chat template refuses them: {error}") from error

    def _place(self, call: Call, before: KnownTurn | None, key: str) -> Place:
        """Return the place of the tokens of branch `key`. Raises RefusedError."""
        template = self.rules.template
        try:
            if call.prompt is not None:
                return self._place_prompt(call.prompt, before)
            images = images_of(call.messages)
            if before is None:
                begun = template.begin(call.messages, call.tools)
                return None, 0, begun, template.placed(begun, images)
            token_ids, known = before.turns.trajectory.token_ids, before.messages
            given_back = map(exactly, call.messages[: len(known)])
            self.num_loose_matches += [*map(exactly, known)] != [*given_back]
            more = template.go_on(token_ids, known, call.messages[len(known) :], call.tools)
            if more.drift is not None:
                self.num_drifts += 1
                self.drifts[key] = str(more.drift)
            kept = before.turns.trajectory.until(more.kept).images
            placed = template.placed(more.token_ids, images[len(kept) :], more.kept)
            return before, more.kept, more.token_ids, placed
        except ChatDriftError as error:
            self.num_drifts += 1
            self.refused_drift = error
            raise invalid("messages", str(error)) from error
        except ValueError as error:
            raise invalid("messages", f"the chat template refuses them: {error}") from error

    def _place_prompt(self, prompt: str | tuple[int, ...], before: KnownTurn | None) -> Place:
        length = 0 if before is None else before.num_tokens
        template = self.rules.template
        if isinstance(prompt, tuple):
            size = template.vocab_size
            if not all(0 <= token < size for token in prompt):
                raise invalid("prompt", f"a token is not within the model's {size}.")
            token_ids = [*prompt[length:]]
            return before, length, token_ids, template.placed(token_ids, (), length)
        known = "" if before is None or before.text is None else before.text
        text = prompt.removeprefix(known)
        encode = template.begin_text if before is None else template.encode
        token_ids = encode(text)
        return before, length, token_ids, template.placed(token_ids, (), length)


def _seen(sampling: asyncio.Task[KnownTurn]) -> None:
    """Retrieve the error, if there is one, which its client handles, or asyncio would log it."""
    if not sampling.cancelled():
        sampling.exception()
