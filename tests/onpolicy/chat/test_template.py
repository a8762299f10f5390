"""Chats as tokens: what was sampled stays, whatever a template does to the past."""

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from onpolicy.chat.messages import exactly, loosely
from onpolicy.chat.template import ChatDriftError, ChatTemplate
from tests.support.chat_tokenizers import (
    END,
    PLAIN,
    REAL,
    TEMPLATES,
    byte_tokenizer,
    real_tokenizer,
)

USER = {"role": "user", "content": "What is on the table?"}
NEXT = [{"role": "user", "content": "And in the box?"}]
CALL = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": '{"in":"box"}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a pin"}


@cache
def template(name: str, rule: str = "new") -> ChatTemplate:
    tokenizer = byte_tokenizer(TEMPLATES[name])
    return ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids(END)], rule)


@cache
def real(name: str, rule: str = "new") -> ChatTemplate:
    tokenizer = real_tokenizer(name)
    stops = [tokenizer.convert_tokens_to_ids(token) for token in REAL[name]]
    return ChatTemplate(tokenizer, stops, rule)


def text_of(chat: ChatTemplate, token_ids: list[int]) -> str:
    return chat._tokenizer.decode(token_ids, skip_special_tokens=False)


def answered(chat: ChatTemplate, token_ids: list[int]) -> dict[str, str]:
    """The message that a client gets for sampled tokens."""
    text = text_of(chat, token_ids)
    for stop in chat._stops:
        text = text.removesuffix(stop)
    return {"role": "assistant", "content": text}


def go_on(chat: ChatTemplate, sampled: list[int], messages=NEXT):
    tokens = [*chat.begin([USER]), *sampled]
    return tokens, chat.go_on(tokens, [USER, answered(chat, sampled)], messages)


def require_as_sampled(chat: ChatTemplate, sampled: list[int]) -> None:
    """The rules of all: what stays is as it was, and the text of the whole is what the template says,
    unless it is kept although it is another."""
    tokens, more = go_on(chat, sampled)
    assert 0 <= more.kept <= len(tokens)
    assert (more.drift is None) == (more.kept == len(tokens)) or chat.rule == "keep"
    assert more.token_ids
    wanted = chat._render([USER, answered(chat, sampled), *NEXT], ())
    if more.drift is None or chat.rule == "new":
        begin = text_of(chat, tokens[: more.kept])
        assert wanted.startswith(begin)
        assert more.token_ids == chat.encode(wanted[len(begin) :])
    if more.drift is not None:
        token = more.drift.token
        assert wanted.startswith(text_of(chat, tokens[:token]))
        assert not wanted.startswith(text_of(chat, tokens))
        assert more.drift.had != more.drift.wants


SAMPLED = st.lists(st.integers(0, 263), min_size=1, max_size=12)


@pytest.mark.parametrize("rule", ["new", "keep"])
@pytest.mark.parametrize("name", TEMPLATES)
@given(sampled=SAMPLED)
@example(sampled=[83, 83, 262])  # ended
@example(sampled=[195, 172])  # half a character
@example(sampled=[220, 220, 83])  # space at the beginning
def test_what_was_sampled_stays(name: str, rule: str, sampled: list[int]) -> None:
    require_as_sampled(template(name, rule), sampled)


@pytest.mark.runs
@pytest.mark.parametrize("rule", ["new", "keep"])
@pytest.mark.parametrize("name", REAL)
def test_what_was_sampled_stays_with_published_tokenizers(name: str, rule: str) -> None:
    chat = real(name, rule)
    special = st.sampled_from(sorted(chat._tokenizer.get_added_vocab().values()))
    token = st.integers(0, chat.vocab_size - 1) | special

    @settings(settings.get_profile("few"))
    @given(st.lists(token, min_size=1, max_size=12))
    def check(sampled: list[int]) -> None:
        require_as_sampled(chat, sampled)

    check()


@pytest.mark.runs
@pytest.mark.parametrize("name", REAL)
def test_a_plain_answer_of_a_published_model_is_continued_as_a_whole(name: str) -> None:
    chat = real(name)
    stop = chat._tokenizer.convert_tokens_to_ids(REAL[name][0])
    sampled = [*chat.encode("On the table is a pin."), stop]
    tokens, more = go_on(chat, sampled)
    if name == "gptoss":  # <|return|> becomes <|end|>, which is one token of another trajectory
        assert more.kept == len(tokens) - 1 and more.drift is not None
        return
    assert more.kept == len(tokens) and more.drift is None
    whole = chat.begin([USER, answered(chat, sampled), *NEXT])
    assert tokens + more.token_ids == whole
    assert whole.count(stop) == (1 if name == "deepseek_v3" else 3)


def test_text_that_a_tokenizer_writes_in_another_form_is_no_drift() -> None:
    """As Qwen's does: an accent beside its letter becomes one character with it."""
    tokenizer = byte_tokenizer(PLAIN)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    stop = tokenizer.convert_tokens_to_ids(END)
    chat = ChatTemplate(tokenizer, [stop])
    sampled = [*chat.encode("e"), *chat.encode("\u0301")]
    user = {"role": "user", "content": "caf" + "e\u0301"}
    assert chat._decode(chat.begin([user])) != chat._render([user], ())
    tokens = [*chat.begin([user]), *sampled, stop]
    said = {"role": "assistant", "content": "e\u0301"}
    more = chat.go_on(tokens, [user, said], NEXT)
    assert more.drift is None and more.kept == len(tokens)
    tokens[-2:-1] = chat.encode("?")
    assert chat.go_on(tokens, [user, said], NEXT).drift is not None


def test_a_stop_token_that_is_the_next_delimiter_comes_once() -> None:
    for rule in ("new", "keep"):
        chat = template("plain", rule)
        stop = chat._tokenizer.convert_tokens_to_ids(END)
        ended, cut = chat.encode("a pin") + [stop], chat.encode("a pin")
        assert go_on(chat, ended)[1].token_ids == go_on(chat, cut)[1].token_ids[1:]
        assert chat.after_answer(ended, NEXT) == chat.after_answer(cut, NEXT)[1:]
        assert chat.after_answer(cut, NEXT)[0] == stop


@pytest.mark.parametrize(
    ("name", "text", "token", "had", "wants"),
    [
        ("drops earlier thinking", "<think>hm</think>a pin", 0, "<think>hm", "a pin<|im_end|>"),
        ("trims", " a pin ", 0, " a pin ", "a pin<|im_end|>"),
        ("ends answers otherwise", "a pin", 5, "<|im_end|>", "<|end|>"),
    ],
)
def test_the_first_token_that_a_template_writes_anew_is_found(
    name: str, text: str, token: int, had: str, wants: str
) -> None:
    chat = template(name)
    sampled = [*chat.encode(text), chat._tokenizer.convert_tokens_to_ids(END)]
    tokens, more = go_on(chat, sampled)
    first = len(tokens) - len(sampled)
    assert more.drift is not None
    assert more.kept == more.drift.token == first + len(chat.encode(text[:token]))
    assert more.drift.had.startswith(had)
    assert more.drift.wants.startswith(wants)
    kept = go_on(template(name, "keep"), sampled)[1]
    assert kept.kept == len(tokens) and kept.drift == more.drift
    with pytest.raises(
        ChatDriftError, match=f"--chat-drift refuse: token {more.drift.token}: .*says"
    ):
        go_on(template(name, "refuse"), sampled)


def test_arguments_that_are_serialised_anew_are_found() -> None:
    chat = template("plain")
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    sampled = chat.encode('<call>look {"in":"box"}</call>')
    tokens = [*chat.begin([USER]), *sampled]
    more = chat.go_on(tokens, [USER, call], [RESULT])
    assert more.drift is not None and more.drift.had.startswith('"box"}</call>')
    assert more.drift.wants.startswith(' "box"}</call>')
    same = chat.encode('<call>look {"in": "box"}</call>')
    assert chat.go_on([*chat.begin([USER]), *same], [USER, call], [RESULT]).drift is None


def test_results_of_tools_that_are_merged_come_once() -> None:
    chat = template("merges results")
    sampled = [*chat.encode("look"), chat._tokenizer.convert_tokens_to_ids(END)]
    _, more = go_on(chat, sampled, [RESULT, {**RESULT, "content": "a cup"}])
    said = text_of(chat, more.token_ids)
    assert said.startswith(
        "\n<|im_start|>user\n<result>a pin</result><result>a cup</result><|im_end|>"
    )


def test_messages_are_the_same_exactly_or_in_what_they_mean() -> None:
    sent = {"role": "assistant", "content": "hm", "reasoning_content": "why", "tool_calls": [CALL]}
    spaced = {**CALL, "function": {"name": "look", "arguments": '{"in": "box"}'}}
    back = {
        "role": "assistant",
        "content": [{"type": "text", "text": " hm\n"}],
        "tool_calls": [spaced],
    }
    assert exactly(sent) != exactly(back)
    assert exactly(sent) == exactly({**sent, "content": [{"type": "text", "text": "hm"}]})
    assert loosely(sent) == loosely(back)
    assert loosely(sent) != loosely({**back, "content": "ah"})
    other = {**CALL, "function": {"name": "look", "arguments": '{"in": "cup"}'}}
    assert loosely(sent) != loosely({**sent, "tool_calls": [other]})


def test_what_a_template_does_not_take_is_refused() -> None:
    tokenizer = byte_tokenizer("{{ raise_exception('no tools here') }}")
    chat = ChatTemplate(tokenizer, [262])
    with pytest.raises(ValueError, match="the chat template refuses the messages: no tools here"):
        chat.begin([USER])
    with pytest.raises(ValueError, match="type='image_url': this model reads text alone"):
        template("plain").begin([{"role": "user", "content": [{"type": "image_url"}]}])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        chat.begin([USER])
    mute = PLAIN.replace("{{ m.content }}", "")
    with pytest.raises(ValueError, match="leaves answers out"):
        ChatTemplate(byte_tokenizer(mute), [262]).after_answer([5], NEXT)


@pytest.mark.runs
def test_qwen3_goes_on_as_the_package_renderers_has_it() -> None:
    """`renderers` of PyPI: rules by hand for each family, which keep what was sampled, too."""
    pytest.importorskip("renderers", reason="no renderers: pip install renderers")
    from renderers import Qwen3RendererConfig, create_renderer

    chat = real("qwen3", "keep")
    theirs = create_renderer(chat._tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    begun, stop = chat.begin([USER]), chat._tokenizer.convert_tokens_to_ids(END)
    for ended in ([stop], []):
        for messages in (NEXT, [RESULT], [RESULT, {**RESULT, "content": "a cup"}]):
            sampled = [*chat.encode("On the table is a pin."), *ended]
            tokens = [*begun, *sampled]
            whole = theirs.bridge_to_next_turn(begun, sampled, messages)
            assert whole is not None
            assert whole.token_ids == tokens + chat.after_answer(tokens, messages)
