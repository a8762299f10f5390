"""Requests that force a call, or allow one at most, are held to that in the form their parser reads."""

import json

import pytest
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from onpolicy.agents.gateway.calls import Call
from onpolicy.agents.gateway.constraints import form_of, tag_of
from onpolicy.agents.gateway.parsing import AnswerParser, Held
from onpolicy.agents.gateway.refusals import RefusedError

INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tool(name, parameters=INTEGER):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (tool("add"), tool("now", {}))
FORCED = {"forces_call": True}
ONE = {"one_call": True}
HERMES = '<tool_call>\n{"name":"%s", "arguments":%s}\n</tool_call>'
ADD, NOW = HERMES % ("add", '{"a": 1}'), HERMES % ("now", "{}")


def call(tools=TOOLS, **asked):
    return Call(model="policy", tools=tools, **asked)


def form(parser="qwen25", stops=("<stop>",), **asked):
    return form_of(call(**asked), AnswerParser(tool_call_parser=parser), stops)


def held(text, **asked):
    return accepts(Grammar.from_structural_tag(tag_of(form(**asked).format)), text)


@pytest.mark.parametrize(
    ("asked", "allowed", "refused"),
    [
        (FORCED, [ADD, NOW, ADD + NOW], ["", "hi", HERMES % ("add", "{}"), HERMES % ("other", "{}")]),
        (FORCED, [ADD], [HERMES % ("now", "5"), HERMES % ("add", '{"a": "x"}')]),
        ({**FORCED, "named_tool": "now"}, [NOW], [ADD, ""]),
        ({**FORCED, **ONE}, [ADD, NOW], [ADD + NOW, ADD + "\n" + NOW, ""]),
        (ONE, ["", "hi", "hi " + ADD], [ADD + NOW, ADD + "\n" + NOW]),
    ],
)  # fmt: skip
def test_an_answer_is_held_to_what_is_asked_for(asked, allowed, refused):
    assert [held(text, **asked) for text in allowed] == [True] * len(allowed)
    assert [held(text, **asked) for text in refused] == [False] * len(refused)


def test_a_request_that_forces_nothing_is_free():
    assert form() is None and form(tools=(), **ONE) is None


def test_a_parser_without_a_form_of_its_own_has_forced_calls_as_a_list():
    found = form("pythonic", **FORCED, **ONE)
    assert found.is_list
    text = '[{"name": "add", "parameters": {"a": 1}}]'
    assert held(text, parser="pythonic", **FORCED)
    assert not held("[]", parser="pythonic", **FORCED)
    two = text[:-1] + ", " + text[1:]
    assert held(two, parser="pythonic", **FORCED) and not held(
        two, parser="pythonic", **FORCED, **ONE
    )
    parsed = AnswerParser(tool_call_parser="pythonic").parse(text, TOOLS, Held(is_list=True))
    assert (parsed.content, parsed.calls) == ("", (("add", '{"a": 1}'),))
    cut = AnswerParser(tool_call_parser="pythonic").parse(text[:-3], TOOLS, Held(is_list=True))
    assert (cut.content, cut.calls) == (text[:-3], ())


def test_definitions_of_tools_are_found_in_a_list_and_those_that_clash_are_refused():
    nested = {
        "properties": {"p": {"$ref": "#/$defs/P"}},
        "required": ["p"],
        "$defs": {"P": INTEGER},
    }
    tools = (tool("place", nested), tool("now", {}))
    text = '[{"name": "place", "parameters": {"p": {"a": %s}}}]'
    assert held(text % "1", parser="pythonic", tools=tools, named_tool="place", **FORCED)
    assert not held(text % '"x"', parser="pythonic", tools=tools, named_tool="place", **FORCED)
    other = {**nested, "$defs": {"P": {"type": "string"}}}
    with pytest.raises(RefusedError, match=r"\$defs.P: two tools define it"):
        form("pythonic", tools=(*tools, tool("put", other)), **FORCED)


def test_calls_of_gpt_oss_come_after_an_analysis_or_at_once():
    sampled = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>" + '{"a": 1}'
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    asked = {"parser": "gpt-oss", "stops": ("<|call|>", "<|return|>"), **FORCED}
    assert held(sampled, **asked) and held(analysis + sampled, **asked)
    assert not held("", **asked) and not held(analysis, **asked)
    assert not held("<|channel|>final<|message|>hi", **asked)
    assert form("gpt-oss", **ONE) is None  # its calls end an answer


@pytest.mark.parametrize(
    ("parser", "stops", "asked", "field"),
    [
        ("pythonic", (), ONE, "parallel_tool_calls"),
        ("hunyuan", (), FORCED, "tool_choice"),
        ("qwen25", ("</tool_call>",), FORCED, "tool_choice"),
    ],
)
def test_what_no_grammar_can_hold_is_refused(parser, stops, asked, field):
    with pytest.raises(RefusedError, match=f"--tool-call-parser={parser}") as refused:
        form(parser, stops, **asked)
    assert refused.value.field == field


def test_every_parser_of_sglang_is_held_to_a_call_that_it_finds_or_refused():
    known, refused = sorted(FunctionCallParser.ToolCallParserEnum), []
    for parser in known:
        try:
            found = form(parser, **FORCED, **ONE)
        except RefusedError as error:
            assert f"--tool-call-parser={parser}" in error.message
            refused.append(parser)
            continue
        grammar = Grammar.from_structural_tag(tag_of(found.format))
        assert not accepts(grammar, "") and not accepts(grammar, "hi"), parser
    assert len(refused) < len(known) // 4, refused


DSML = (
    '\n\n<|DSML|{0}>\n<|DSML|{1}invoke name="add">\n<|DSML|{1}parameter name="a" string="false">1'
    "</|DSML|{1}parameter>\n</|DSML|{1}invoke>\n</|DSML|{0}>"
).replace("|", "\uff5c")
NATIVE = {
    "deepseekv32": DSML.format("function_calls", ""),
    "deepseekv4": DSML.format("tool_calls", ""),
    "deepseekv41": DSML.format(" calls", " "),
    "glm47": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" '
    'type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
}
"""Calls as templates write them that have no JSON, or JSON between marks of their own."""


@pytest.mark.parametrize("parser", NATIVE)
def test_a_forced_call_has_the_form_of_its_template_and_is_found(parser):
    assert not form(parser, **FORCED).is_list
    assert held(NATIVE[parser], parser=parser, **FORCED)
    found = AnswerParser(tool_call_parser=parser).parse(NATIVE[parser], TOOLS, Held())
    assert (found.content, found.calls) == ("", (("add", '{"a": 1}'),))


FORMAT = {"json_schema": '{"type": "object"}'}


def test_every_parser_of_sglang_tells_calls_from_a_format_or_the_format_is_refused():
    tells = []
    for parser in sorted(FunctionCallParser.ToolCallParserEnum):
        try:
            begins = form(parser, **FORMAT).begins if parser != "gpt-oss" else ()
        except RefusedError as error:
            assert error.field == "response_format" and "With tool_choice=none" in error.message
            continue
        if begins:
            tells.append(parser)
            assert not any(begin.startswith(("{", "[{", '"')) for begin in begins), parser
    assert {"qwen25", "hermes", "llama3", "mistral", "deepseekv3", "kimi_k2", "glm47"} < {*tells}
    assert not {"pythonic", "glm45", "kimi_k3", "gpt-oss"} & {*tells}


@pytest.mark.parametrize("parser", ["qwen25", "llama3"])
def test_an_answer_in_a_format_is_no_call_whatever_it_says(parser):
    begins = form(parser, **FORMAT).begins
    for text in ('{"a": 1}', '{"name": "add", "arguments": {"a": 1}}', json.dumps({"b": ADD})):
        parsed = AnswerParser(tool_call_parser=parser).parse(text, TOOLS, Held(begins=begins))
        assert (parsed.content, parsed.calls) == (text, ())


def test_what_an_answer_depends_on_says_the_choice_and_is_as_before_without_one():
    free = call().decisive
    assert len({str(each) for each in (free, call(**FORCED).decisive, call(**ONE).decisive)}) == 3
    assert json.loads(json.dumps(free)) == [
        [], "", None, json.loads(json.dumps(TOOLS)), None, None, [],
    ]  # fmt: skip
