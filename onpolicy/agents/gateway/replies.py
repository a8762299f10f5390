"""Conversion of a sampled answer into the reply that its client reads."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.agents.gateway.calls import Call, Ending, Reply, ToolCall
from onpolicy.agents.gateway.harmony import with_call_marks
from onpolicy.agents.gateway.known import digest_of
from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.rollout.episodes import Answer, Turns
from onpolicy.trajectory import FinishReason


def make_reply(
    call: Call,
    branch: Turns,
    prompt_ids: Sequence[int],
    answer: Answer,
    parser: AnswerParser,
    *,
    is_list: bool = False,
    is_thinking: bool = False,
) -> Reply:
    """Return the reply: the text without the token or text that ended it, parsed.

    is_list, is_thinking: see `AnswerParser.parse`.
    """
    name = digest_of(branch.key)[:24]
    text, stopped_by = _shown(call, branch, answer)
    if parser.reads_harmony and answer.finish_reason == FinishReason.STOP and not stopped_by:
        text = with_call_marks(text)
    parsed = parser.parse(text, call.tools, is_list=is_list, is_thinking=is_thinking)
    is_cut = answer.finish_reason == FinishReason.LENGTH
    texts = [answer.decode([t]) for t in answer.token_ids] if call.log_probs else []
    ending: Ending = "tool_calls" if parsed.calls else "length" if is_cut else "stop"
    return Reply(
        name=name,
        content=parsed.content,
        reasoning=parsed.reasoning,
        tool_calls=tuple(
            ToolCall(id=_call_id(name, i), name=function, arguments=arguments)
            for i, (function, arguments) in enumerate(parsed.calls)
        ),
        ending=ending,
        stopped_by=stopped_by,
        prompt_ids=prompt_ids,
        token_ids=answer.token_ids,
        log_probs=answer.log_probs if call.log_probs else (),
        token_texts=texts,
        token_bytes=_bytes_of(answer, parser, texts),
    )


def _bytes_of(answer: Answer, parser: AnswerParser, texts: Sequence[str]) -> list[bytes]:
    """Return the bytes of each token whose text was requested."""
    if texts and parser.read_bytes is not None:
        return parser.read_bytes(answer.token_ids)
    return [text.encode() for text in texts]


def _shown(call: Call, branch: Turns, answer: Answer) -> tuple[str, str]:
    """Return the text, and the entry of the call's stop texts that ended it."""
    token_ids = answer.token_ids
    stop_token_ids = branch.request.params.stop_token_ids
    if answer.finish_reason == FinishReason.STOP and token_ids[-1] in stop_token_ids:
        return answer.decode(token_ids[:-1]), ""
    text = answer.text
    found = [(text.find(stop), stop) for stop in call.stop if stop in text]
    start, stop = min(found, default=(len(text), ""))
    return text[:start], stop


def _call_id(name: str, index: int) -> str:
    """Return an id of nine letters and digits: some templates accept no others, and print them."""
    return digest_of(name, index)[:9]
