"""A chat template ends within its bound or is refused; one that ends makes the text that it made."""

import pytest
from transformers.utils import chat_template_utils

from onpolicy.chat import bounded
from onpolicy.chat.bounded import TemplateWorkError, bound_templates
from onpolicy.chat.template import ChatTemplate
from onpolicy.chat.turn_ends import turn_ends
from tests.support.chat_tokenizers import REAL, TEMPLATES, byte_tokenizer, real_tokenizer

USER = {"role": "user", "content": "What is 3 + 4?"}
FUNCTION = {
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
TOOL = {"type": "function", "function": FUNCTION}

ENDLESS = {
    "nested ranges": "{% for i in range(25000) %}{% for j in range(25000) %}x{% endfor %}{% endfor %}",
    "ranges that are filtered": "{% for i in range(99999) %}{% for j in range(99999) if not i %}"
    "{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for i in [60] recursive %}{% if i %}{{ loop([i - 1, i - 1]) }}{% endif %}"
    "{% endfor %}",
    "a recursive loop over ranges": "{% for i in range(99999) recursive %}{{ loop(range(i)) }}"
    "{% endfor %}",
    "one range": "{% for i in range(1000000000) %}{% endfor %}",
    "a line of dashes": "{{ '-' * 10000000000 }}",
    "a wide indent": "{{ 'x' | indent(10000000000, true) }}",
    "a wide line": "{{ 'x' | center(10000000000) }}{{ 'x'.ljust(10000000000) }}",
    "a doubled text": "{% set ns = namespace(s='ab') %}{% for i in range(90) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "an added text": "{% set ns = namespace(s='ab') %}{% for i in range(90) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
}
"""Nested ranges, one range, and lines of dashes and wide indents are what public reports are about:
deepset-ai/haystack#9402, ggml-org/llama.cpp#24140, mitsuhiko/minijinja#924."""


def error_of(template, messages=(USER,)):
    with pytest.raises(ValueError, match="the chat template refuses the messages") as refused:
        ChatTemplate(byte_tokenizer(template)).begin(messages)
    return refused.value.__cause__


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_refused_with_the_rule_and_what_to_do(name):
    error = error_of(ENDLESS[name])
    assert isinstance(error, TemplateWorkError | RecursionError), error
    if isinstance(error, TemplateWorkError):
        assert "more than 200,000 steps" in str(error) and "chat_template.jinja" in str(error)


def test_numbers_that_are_too_large_are_refused():
    many = "{% for i in range(90) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"
    squares = "{% set ns = namespace(n=9) %}" + many
    for template in (squares, "{{ 2 ** 10000000 }}"):
        assert "bits, and it may have 4,096" in str(error_of(template))


def test_what_is_folded_while_a_template_is_compiled_has_a_bound_too():
    wide = "{% if true %}{{ 'x' | center(10000000000) }}{{ '-' * 10000000000 }}{% endif %}"
    assert isinstance(error_of(wide), TemplateWorkError)


def test_how_turns_end_is_not_looked_for_without_end():
    assert turn_ends(byte_tokenizer(ENDLESS["nested ranges"])) is None


def test_a_rendering_may_take_as_many_steps_more_as_it_has_messages_and_each_its_own(monkeypatch):
    monkeypatch.setattr(bounded, "STEPS_EACH", 30)
    twice = "{% for m in messages %}{% for i in range(25) %}.{% endfor %}{% endfor %}"
    template = ChatTemplate(byte_tokenizer(twice))
    for count in (1, 1, 20, 1):
        assert len(template.begin([USER] * count)) == 25 * count
    thrice = twice.replace("25", "80")
    assert isinstance(error_of(thrice, [USER] * 20), TemplateWorkError)


def chats():
    call = {
        "id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 3}},
    }  # fmt: skip
    yield [USER], None
    yield [USER, {"role": "assistant", "content": "7"}, USER], None
    yield [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], [TOOL]
    yield [{"role": "system", "content": "You add."}, USER], [TOOL]


def texts(tokenizer, monkeypatch, unbounded):
    bound_templates()
    compile_ = chat_template_utils._cached_compile_jinja_template
    with monkeypatch.context() as patched:
        if unbounded:
            patched.setattr(
                chat_template_utils, "_cached_compile_jinja_template", compile_.unbounded
            )
        for messages, tools in chats():
            for begins in (False, True):
                try:
                    yield tokenizer.apply_chat_template(
                        messages, tools=tools, tokenize=False, add_generation_prompt=begins
                    )
                except Exception as error:
                    yield f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", [*TEMPLATES, *REAL, "of all kinds"])
def test_a_template_that_ends_makes_the_same_text_with_a_bound(name, monkeypatch):
    everything = (
        "{% for m in messages[::-1] %}{{ loop.index }}{{ loop.length }}{{ loop.last }}"
        "{{ loop.revindex }}{{ loop.nextitem.role }}{{ loop.changed(m) }}"
        "{% for k, v in m.items() if v is string %}{{ k ~ v }}"
        "{% else %}none{% endfor %}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
        "{% for x in nothing %}{% else %}{{ 'x' * 3 }}{{ 2 ** 3 + 4 * 5 }}{{ [1] + [2] }}{% endfor %}"
        "{% for x in [[1, []], [2, [[3, []]]]] recursive %}{{ x[0] }}{{ loop(x[1]) }}{% endfor %}"
        "{{ (tools or []) | tojson(indent=2) }}{{ messages | map(attribute='role') | join(',') }}"
    )
    made = {**TEMPLATES, "of all kinds": everything}
    tokenizer = byte_tokenizer(made[name]) if name in made else real_tokenizer(name)
    plain = [*texts(tokenizer, monkeypatch, unbounded=True)]
    assert [*texts(tokenizer, monkeypatch, unbounded=False)] == plain
    assert any(len(text) > 20 for text in plain)


def test_templates_in_the_process_of_a_server_have_a_bound(monkeypatch):
    from sglang_patches import chats, registry

    compile_ = bounded_compile()
    monkeypatch.setattr(chat_template_utils, "_cached_compile_jinja_template", compile_.unbounded)
    monkeypatch.setattr(registry, "hook", lambda *_: None)
    chats.install()
    with pytest.raises(TemplateWorkError):
        byte_tokenizer(ENDLESS["nested ranges"]).apply_chat_template([USER], tokenize=False)


def bounded_compile():
    bound_templates()
    return chat_template_utils._cached_compile_jinja_template
