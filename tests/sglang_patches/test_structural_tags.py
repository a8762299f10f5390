"""A forced call that SGLang writes as a structural tag of the earlier form is one of today's."""

import json

import pytest
from sglang.srt.entrypoints.openai.protocol import Tool, ToolChoice
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from onpolicy.models.token_grammars import require_grammar
from sglang_patches.engine_grammars import of_today

FUNCTION = {"name": "add", "strict": True, "parameters": {"properties": {"a": {"type": "integer"}}}}


def test_what_sglang_writes_for_a_forced_call_is_a_grammar():
    parser = FunctionCallParser([Tool(type="function", function=FUNCTION)], "qwen25")
    named = ToolChoice(type="function", function={"name": "add"})
    for choice in ("required", named):
        kind, tag = parser.get_structure_constraint(choice)
        assert kind == "structural_tag"
        grammar = Grammar.from_structural_tag(of_today(tag.model_dump_json(by_alias=True)))
        call = '<tool_call>\n{"name":"add", "arguments":{"a": %s}}\n</tool_call>'
        assert accepts(grammar, call % 1)
        assert not accepts(grammar, call % '"x"') and not accepts(grammar, "hi")


NO_FORM = ("", "{", "[]", "3", '{"structures": [{}], "triggers": []}', '{"format": null}')


@pytest.mark.parametrize("tag", NO_FORM)
def test_a_text_in_no_form_is_left_to_the_compiler_which_refuses_it_in_plain_words(tag):
    """Elsewhere such texts ended a server (sglang#13752) or were its error (vllm#44131 and #47450)."""
    assert of_today(tag) == tag
    with pytest.raises(ValueError, match=r"structural_tag=.*cannot be held to it"):
        require_grammar("structural_tag", of_today(tag), (1,))


def test_a_tag_of_todays_form_stays_as_it_is():
    tag = json.dumps({"type": "structural_tag", "format": {"type": "any_text"}})
    assert of_today(tag) == tag
