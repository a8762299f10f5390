"""Messages whose words a template leaves out are found, whatever it does to those that it writes."""

import pytest

from onpolicy.chat.rendering import left_out
from tests.support.chat_tokenizers import TEMPLATES, byte_tokenizer

FOUR_ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant', 'tool') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
LAST_ONLY = "{{ messages[-1].content }}"
USER = {"role": "user", "content": "What is 3 + 4?"}


def found(template, messages):
    tokenizer = byte_tokenizer(template)
    return left_out(messages, lambda all: tokenizer.apply_chat_template(all, tokenize=False))


@pytest.mark.parametrize("role", ["developer", "function", "critic", "latest_reminder"])
def test_a_role_that_the_template_does_not_know_is_found(role):
    assert found(FOUR_ROLES, [{"role": role, "content": "In French."}, USER]) == [0]
    assert found(FOUR_ROLES, [USER, {"role": role, "content": "In French."}]) == [1]


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_role_that_it_knows_is_not(role):
    assert found(FOUR_ROLES, [{"role": role, "content": "In French."}, USER]) == []


def test_a_known_role_in_a_place_where_the_template_does_not_look_is_found():
    system = {"role": "system", "content": "In French."}
    assert found(SYSTEM_FIRST, [system, USER]) == []
    assert found(SYSTEM_FIRST, [system, USER, system]) == [2]
    assert found(LAST_ONLY, [system, USER]) == [0]


def test_words_that_stand_elsewhere_too_are_no_witness():
    said = [{"role": "developer", "content": "user"}, {"role": "user", "content": "user"}]
    assert found(FOUR_ROLES, said) == [0]


@pytest.mark.parametrize("content", ["", " \n", None])
def test_of_a_message_without_words_nothing_is_left_out(content):
    assert found(FOUR_ROLES, [{"role": "developer", "content": content}, USER]) == []


CHANGED = {
    "trimmed": "{{ m.content | trim }}", "in capitals": "{{ m.content | upper }}",
    "in small letters": "{{ m.content | lower }}", "as JSON": "{{ m.content | tojson }}",
}  # fmt: skip


@pytest.mark.parametrize("written", CHANGED.values(), ids=CHANGED)
def test_words_that_are_written_otherwise_are_written(written):
    template = "{% for m in messages %}" + written + "{% endfor %}"
    messages = [{"role": "system", "content": 'Say "no"\n'}, {**USER, "content": " \u00e9\n7 "}]
    assert found(template, messages) == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_drop_of_answers_is_theirs_to_say(name):
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    answer = {"role": "assistant", "content": "<think>7</think>7", "tool_calls": [call]}
    assert found(TEMPLATES[name], [USER, answer, {"role": "tool", "content": "7"}, USER]) == []


def test_a_template_that_wants_other_words_than_marks_is_not_blamed():
    template = (
        "{% for m in messages %}{{ raise_exception('no number') if m.content != '7' }}{% endfor %}"
    )
    assert found(template, [{"role": "user", "content": "7"}]) == []
