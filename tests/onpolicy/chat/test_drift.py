"""Templates that rewrite the past: `--chat-drift words` keeps a chat whose words are the same."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from onpolicy.chat.template import ChatTemplate
from onpolicy.chat.turn_ends import turn_ends
from tests.support.chat_tokenizers import (
    END,
    PLAIN,
    PUBLISHED,
    TEMPLATES,
    byte_tokenizer,
    published_tokenizer,
)

USER = {"role": "user", "content": "What is on the table?"}
NEXT = [{"role": "user", "content": "And in the box?"}]
PARAMETERS = {"type": "object", "properties": {"in": {"type": "string", "description": "a place"}}}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
LAST_USER = (
    "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
)

FRAMES = {
    # The generation prompt opens a thought that the past leaves out (PrimeIntellect-ai/verifiers#476).
    "opens the thinking": (PLAIN.replace("assistant\n", "assistant\n<think>\n"), "\n</think>\n\n"),
    # Empty thoughts are left out of the past (QwenLM/Qwen3.8#131).
    "leaves out an empty thought": (PLAIN, "<think>\n\n</think>\n\n"),
    "ends answers otherwise": (TEMPLATES["ends answers otherwise"], ""),
    "trims": (TEMPLATES["trims"], " "),
    "moves the tools": (
        LAST_USER + PLAIN.replace(
            "{{ m.role }}\n",
            "{{ m.role }}\n{% if tools and loop.index0 == last.user %}"
            "<tools>{{ tools | tojson }}</tools>{% endif %}",
        ),
        "",
    ),
}  # fmt: skip
"""Templates that change only the frame of what was sampled, and what an answer begins with."""

WORDS = st.text("ab.,\u00e97 ", min_size=1, max_size=12).map(str.strip).filter(bool)
CALLS = st.tuples(st.sampled_from(["look", "add"]), st.dictionaries(WORDS, WORDS | st.integers()))
ANSWERS = st.lists(st.tuples(WORDS | CALLS, st.lists(WORDS, min_size=1, max_size=2)), max_size=4)


def made(template: str, rule: str, stops=(END,), more=()) -> ChatTemplate:
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens([AddedToken(x, normalized=False) for x in ("<think>", "</think>")])
    tokenizer.add_tokens(list(more), special_tokens=True)
    return ChatTemplate(tokenizer, tokenizer.convert_tokens_to_ids(list(stops)), rule)


def message(answer, thought=""):
    """An answer as a client gets it, and as it was sampled: calls in a policy's own spacing."""
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}, answer
    name, arguments = answer
    call = {"type": "function", "id": "c1", "function": {"name": name}}
    call["function"]["arguments"] = text = json.dumps(arguments, ensure_ascii=False, indent=1)
    return {"role": "assistant", "content": "", "tool_calls": [call]}, f"<call>{name} {text}</call>"


def said(text: str) -> list[list[str]]:
    """Who says what, by another reading than the product's: by turns, each without its frame."""
    turns = [turn.split("\n", 1) for turn in text.split("<|im_start|>")[1:]]
    frame = r"<think>\s*</think>|<think>\n$|<tools>.*</tools>|<\|(im_)?end\|>|\s"
    return [[role, re.sub(frame, "", words)] for role, words in turns]


@pytest.mark.parametrize("name", FRAMES)
@given(answers=ANSWERS)
def test_a_chat_in_another_frame_is_one_trajectory_that_says_the_same(name: str, answers) -> None:
    template, begins = FRAMES[name]
    chat = made(template, "words")
    known, token_ids = [USER], chat.begin([USER], [TOOL])
    for answer, replies in answers:
        got, text = message(answer)
        role = "user" if isinstance(answer, str) else "tool"
        new = [{"role": role, "content": reply} for reply in replies]
        token_ids += [*chat.encode(begins + text), *chat.encode(END)]
        known.append(got)
        more = chat.go_on(token_ids, known, new, [TOOL])
        assert more.kept == len(token_ids)
        token_ids += more.token_ids
        known += new
        whole = chat._render(known, [TOOL])
        assert said(chat._decode(token_ids)) == said(whole)
        assert more.drift is not None or chat._decode(token_ids) == whole


@given(thought=WORDS, words=WORDS)
def test_a_chat_whose_words_are_left_out_begins_anew(thought: str, words: str) -> None:
    """As in verl-project/verl#6854; nothing is duplicated, as it was in NVIDIA-NeMo/RL#2821."""
    more = {}
    for rule in ("words", "new"):
        chat = made(TEMPLATES["drops earlier thinking"], rule)
        text = f"<think>{thought}</think>{words}"
        token_ids = [*chat.begin([USER]), *chat.encode(text + END)]
        more[rule] = chat.go_on(token_ids, [USER, message(text)[0]], NEXT)
    assert more["words"] == more["new"] and more["new"].kept < len(token_ids)


def test_a_call_that_the_template_leaves_out_begins_a_chat_anew() -> None:
    chat = made(re.sub("{% for c in .*{% endfor %}{{ m.c", "{{ m.c", PLAIN), "words")
    got, text = message(("look", {"in": "box"}))
    token_ids = [*chat.begin([USER]), *chat.encode(text + END)]
    assert chat.go_on(token_ids, [USER, got], NEXT).kept < len(token_ids)


ROLES = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}<call>"
    "{{ m.tool_calls[0].function.arguments | tojson }}</call>{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_stop_token_that_is_another_role_does_not_speak_for_it() -> None:
    """huggingface/trl#6044: GLM's answers end with the role of the next message."""
    roles = ("<|user|>", "<|tool|>", "<|assistant|>")
    answer = {"role": "assistant", "content": "a pin"}
    for stop, text in (("<|user|>", ""), ("<|tool|>", "<|user|>"), ("", "<|user|>")):
        expected = f"{text}And in the box?<|assistant|>"
        for rule in ("keep", "words"):
            chat = made(ROLES, rule, roles[:2], roles)
            token_ids = [*chat.begin([USER]), *chat.encode("a pin" + stop)]
            more = chat.go_on(token_ids, [USER, answer], NEXT)
            is_wrong = rule == "words" and stop == "<|tool|>"
            assert (more.kept < len(token_ids)) == is_wrong
            assert is_wrong or chat._decode(more.token_ids) == expected


def test_the_rest_of_a_call_comes_once_where_the_template_does_not_end_it() -> None:
    """As in DeepSeek-V3's template, whose single calls end with no token."""
    template = PLAIN.replace("<|im_end|>\n", "{% if not m.tool_calls %}<|im_end|>\n{% endif %}")
    got, text = message(("look", {}))
    for rule in ("keep", "words"):
        chat = made(template, rule)
        token_ids = [*chat.begin([USER]), *chat.encode(text + END)]
        more = chat.go_on(token_ids, [USER, got], [{"role": "tool", "content": "a pin"}])
        assert more.kept == len(token_ids)
        assert chat._decode(more.token_ids).startswith("<|im_start|>tool\na pin<|im_end|>")


def test_a_result_without_a_name_has_that_of_its_call() -> None:
    """GPT-OSS's template says which function a result is of, and OpenAI's clients do not."""
    named = "{% if m.role == 'tool' %}{{ loop.previtem.tool_calls[0].function.name }}: {% endif %}"
    chat = made(PLAIN.replace("{{ m.content }}", named + "{{ m.content }}"), "keep")
    got, text = message(("look", {"in": "box"}))
    token_ids = [*chat.begin([USER]), *chat.encode(text + END)]
    more = chat.go_on(token_ids, [USER, got], [{"role": "tool", "content": "a pin"}])
    assert more.drift is not None and "tool\nlook: a pin" in chat._decode(more.token_ids)


WITHOUT_CALLS = ("Gemma-3", "Phi-3.5", "Phi-4-mini", "SmolLM3")
"""Those that refuse results of tools, or leave calls out."""


def sampled(chat: ChatTemplate, known, answer, tools, thought: str) -> list[int]:
    """An answer as its family's policies write it, after the generation prompt."""
    before, whole = chat._render(known, tools), chat._render([*known, answer], tools, goes_on=False)
    ends = turn_ends(chat._tokenizer).token_ids
    stop = chat._decode([ends[-1 if answer.get("tool_calls") else 0]])
    same = max(i for i in range(len(before) + 1) if whole.startswith(before[:i]))
    same = same if same == len(before) else before.rindex("<", 0, same + 1)
    text = whole[same:].partition(stop)[0] + stop
    if "<|channel|>" in chat._source:
        analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        return chat.encode(analysis * bool(thought) + text)
    opens = before.rstrip().endswith("<think>")
    if thought or opens:
        text = re.sub(r"^\s*(<think>\s*)?(</think>\s*)?", "", text)
        text = f"{'' if opens else '<think>'}\n{thought}\n</think>\n\n{text}"
    return chat.encode(text)


def trajectories(name: str, rule: str, thought: str) -> int:
    """The number of trajectories of a chat with three answers, the first of which is a call."""
    tokenizer = published_tokenizer(name)
    options = {"thinking": True} if name == "DeepSeek-V3.1" and thought else {}
    chat = ChatTemplate(tokenizer, turn_ends(tokenizer).token_ids, rule, options)
    calls = name not in WITHOUT_CALLS
    call = message(("look", {"in": "box"}))[0] if calls else message("I look.")[0]
    result = {"role": "tool" if calls else "user", "tool_call_id": "call00001", "content": "a pin"}
    if calls:
        call["tool_calls"][0]["id"] = "call00001"
    tools, known, begun = [TOOL] * calls, [USER], 1
    token_ids = chat.begin(known, tools)
    thanks = [{"role": "user", "content": "Thanks!"}]
    for answer, new in (
        (call, [result]),
        (message("A pin.")[0], NEXT),
        (message("No.")[0], thanks),
    ):
        token_ids += sampled(chat, known, answer, tools, thought)
        known = [*known, {**answer, "reasoning_content": thought} if thought else answer]
        more = chat.go_on(token_ids, known, new, tools)
        begun += more.kept < len(token_ids)
        assert rule != "keep" or more.kept == len(token_ids)
        token_ids, known = [*token_ids[: more.kept], *more.token_ids], [*known, *new]
    return begun


@pytest.mark.runs
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_make_as_many_trajectories_as_documented(name: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()
    rows = [row.strip("| ").split("|") for row in text.splitlines() if row.startswith("| ")]
    cells = [row[1:3] for row in rows if name in re.split(", | ", row[0])]
    made = [[trajectories(name, r, t) for r in ("new", "words")] for t in ("", "hm let me")]
    expected = [[int(count) for count in cell.split(",")] for cell in cells[0] if cell.strip()]
    assert len(cells) == 1 and made[: len(expected)] == expected
    assert trajectories(name, "keep", "hm let me") == 1
