"""The token with which a chat template ends an assistant's turn is found by rendering an answer."""

import pytest
from tokenizers import AddedToken

from onpolicy.chat.turn_ends import TurnEnds, turn_ends
from tests.support.chat_tokenizers import REAL, TEMPLATES, byte_tokenizer, real_tokenizer


def tokenizer_of(template, special=(), added=()):
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens([AddedToken(x, normalized=False) for x in special], special_tokens=True)
    tokenizer.add_tokens([AddedToken(x, normalized=False) for x in added])
    return tokenizer


def ends_of(template, special=(), added=()):
    """The tokens as text, and the text that ends an answer in the place of a token."""
    tokenizer = tokenizer_of(template, special, added)
    ends = turn_ends(tokenizer)
    return ends and (tokenizer.convert_ids_to_tokens(list(ends.token_ids)), ends.text)


def each(written):
    """A template that writes this for each message."""
    return "{% for m in messages %}" + written + "{% endfor %}"


CHATML = TEMPLATES["plain"]

KNOWN = {
    "ChatML": (CHATML, [], [], ["<|im_end|>"]),
    "an end that is no special token, as add_tokens makes it": (
        CHATML.replace("<|im_end|>", "<|fin|>"), [], ["<|fin|>"], ["<|fin|>"]
    ),
    "Gemma's, with a new line after it": (
        each("<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"),
        ["<start_of_turn>", "<end_of_turn>"], [], ["<end_of_turn>"],
    ),
    "Gemma's, which takes no system's message and wants turns in order": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        + each(
            "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}"
            "{% endif %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n"
        ),
        ["<start_of_turn>", "<end_of_turn>"], [], ["<end_of_turn>"],
    ),
    "one that wants a system's message": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML,
        [], [], ["<|im_end|>"],
    ),
    "Phi's, which ends the whole chat with another token": (
        each("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n")
        + "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
        ["<|user|>", "<|assistant|>", "<|endoftext|>"], [], ["<|end|>"],
    ),
    "Phi's, with an end that is no special token": (
        each("<|{{ m.role }}|>\n{{ m.content }}<|fin|>\n")
        + "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
        ["<|user|>", "<|assistant|>", "<|endoftext|>"], ["<|fin|>"], ["<|fin|>"],
    ),
    "GPT-OSS's, whose end of a message in the past ends no answer": (
        each(
            "<|start|>{{ m.role }}{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}"
            "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
            "<|message|>{{ m.content }}{% if loop.last and m.role == 'assistant' %}<|return|>"
            "{% else %}<|end|>{% endif %}{% endif %}"
        ),
        ["<|start|>", "<|message|>", "<|return|>", "<|call|>"], [], ["<|return|>", "<|call|>"],
    ),
    "one that wants a tool's description, as GPT-OSS's does": (
        "{% for t in tools or [] %}{{ '// ' + t.function.description }}{% endfor %}"
        + each("<|head|>{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}"
               "<|call|>{% else %}{{ m.content }}<|return|>{% endif %}"),
        ["<|head|>", "<|return|>", "<|call|>"], [], ["<|return|>", "<|call|>"],
    ),
    "Llama's, whose calls end otherwise": (
        each(
            "<|head|>{{ m.role }}\n{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
            "<|eom_id|>{% else %}{{ m.content }}<|eot_id|>{% endif %}"
        ),
        ["<|head|>", "<|eot_id|>", "<|eom_id|>"], [], ["<|eot_id|>", "<|eom_id|>"],
    ),
    "arguments that are to be text": (
        each(
            "<|head|>{% if m.tool_calls %}{{ 'f' + m.tool_calls[0].function.arguments }}<|eom_id|>"
            "{% else %}{{ m.content }}<|eot_id|>{% endif %}"
        ),
        ["<|head|>", "<|eot_id|>", "<|eom_id|>"], [], ["<|eot_id|>", "<|eom_id|>"],
    ),
    "calls within marks of their own": (
        each(
            "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<call>"
            "{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n"
        ),
        [], ["<call>", "</call>"], ["<|im_end|>"],
    ),
    "answers within marks of their own": (
        each(
            "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<answer>{{ m.content }}</answer>"
            "{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        ),
        [], ["<answer>", "</answer>"], ["<|im_end|>"],
    ),
    "GLM's, which ends a turn with the marker of the next": (
        each(
            "{% if m.role == 'tool' %}<|observation|>{% else %}<|{{ m.role }}|>{% endif %}\n"
            "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>"
            "{% endfor %}"
        ),
        ["<|user|>", "<|assistant|>", "<|observation|>"], ["<call>", "</call>"],
        ["<|user|>", "<|observation|>"],
    ),
    "the variable eos_token": (
        each("{{ m.role }}: {{ m.content }}{{ eos_token }}\n"), [], [], ["<|im_end|>"]
    ),
    "the beginning of an answer in any case": (
        each("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n") + "<|im_start|>assistant\n",
        [], [], ["<|im_end|>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_the_token_that_ends_an_answer_is_found(name):
    template, special, added, ends = KNOWN[name]
    assert ends_of(template, special, added) == (ends, "")


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_does_to_the_past_does_not_matter(name):
    end = "<|end|>" if name == "ends answers otherwise" else "<|im_end|>"
    assert ends_of(TEMPLATES[name]) == ([end], "")


@pytest.mark.parametrize(
    "name", sorted(REAL.keys() - {"gptoss", "gemma3"})
)  # no template; a big file
def test_the_ends_of_published_templates_are_those_that_their_models_are_known_to_stop_at(name):
    tokenizer = real_tokenizer(name)
    ends = turn_ends(tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(ends.token_ids)) == REAL[name][:1]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (each("### {{ m.role }}:\n{{ m.content }}\n### End\n"), "### End"),
        (each("{{ m.role }}: {{ m.content }}\n"), "user:"),
        (CHATML.replace("<|im_end|>", "<|fin|>").replace("<|im_start|>", "<|new|>"), "<|fin|>"),
        (each("{{ m.content }}"), ""),
    ],
    ids=["words", "the next turn's words", "what only looks like a token", "nothing"],
)
def test_an_end_that_is_no_token_is_told_as_text(template, text):
    assert ends_of(template) == ([], text)


@pytest.mark.parametrize(
    "template",
    [None, "{{ raise_exception('no chats') }}", "{{ messages[0].content }}", "{{ nobody() }}"],
    ids=["no template", "a refusal", "answers are left out", "a program that fails"],
)
def test_of_a_template_that_shows_no_answer_nothing_is_known(template):
    assert ends_of(template) is None


def test_a_template_that_ends_no_answer_is_not_a_template_that_shows_none():
    assert turn_ends(tokenizer_of(each("{{ m.content }}"))) == TurnEnds()
