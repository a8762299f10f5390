"""The unmodified clients of OpenAI and Anthropic act through the gateway, streaming and with tools."""

import json
from functools import partial

import anthropic
import openai
import pytest
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from onpolicy.agents.gateway.gateway_server import Gateway
from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.agents.gateway.session import SessionRules
from onpolicy.errors import AgentError
from onpolicy.rollout.rollouter import Episode
from tests.support.acting import Says, SpelledOut, decode, roll_out
from tests.support.clients import async_client_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "strict": True, "parameters": PARAMETERS}}
HI = [{"role": "user", "content": "hi"}]
MODEL = {"model": "policy"}


PARSER = AnswerParser(tool_call_parser="qwen25", reasoning_parser="qwen3")


def through(act, words=("yes",), most_at_once=64, parser=PARSER, draws=None, template=None, **more):
    """The episode in which `act(openai client, anthropic client, opened session)` acts, with what it
    returned."""
    found = []

    async def rolled(prompt, turns):
        rules = SessionRules(
            template=template or SpelledOut(),
            parser=parser,
            most_at_once=most_at_once,
        )
        gateway = Gateway(rules)
        opened = await gateway.open(turns)
        ours = async_client_of(opened.base_url, opened.api_key)
        theirs = anthropic.AsyncAnthropic(
            base_url=opened.base_url.removesuffix("/v1"), api_key=opened.api_key, max_retries=0
        )
        async with ours, theirs:
            try:
                found.append(await act(ours, theirs, opened))
            finally:
                branches = await gateway.end(opened)
                await gateway.close()
        return Episode(trajectories=branches, reward=1.0)

    return roll_out(rolled, draws or Says(words), **more), found[0]


def test_a_chat_is_one_trajectory_and_only_its_answers_are_learnt():
    async def act(ours, theirs, opened):
        messages = list(HI)
        for text in ("more", "end"):
            answer = await ours.chat.completions.create(messages=messages, **MODEL)
            messages += [answer.choices[0].message, {"role": "user", "content": text}]
        return answer

    episode, answer = through(act, ["one", "two"])
    (trajectory,) = episode.trajectories
    assert decode(trajectory.token_ids) == (
        "user:hi|assistant:one<stop>user:more|assistant:two<stop>"
    )
    assert decode(trajectory.response_ids) == "one<stop>two<stop>"
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 4)


def test_tools_are_called_and_their_results_read_in_every_protocol():
    async def chat(ours, theirs, opened):
        messages = list(HI)
        answer = await ours.chat.completions.create(messages=messages, tools=[TOOL], **MODEL)
        (call,) = answer.choices[0].message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        messages += [answer.choices[0].message, result]
        await ours.chat.completions.create(messages=messages, tools=[TOOL], **MODEL)
        return answer.choices[0].finish_reason, call.function.name, call.function.arguments

    async def responses(ours, theirs, opened):
        tool = {"type": "function", **TOOL["function"]}
        answer = await ours.responses.create(input="hi", tools=[tool], **MODEL)
        (call,) = answer.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        given = [*HI, *answer.output, result]
        await ours.responses.create(input=given, tools=[tool], **MODEL)
        return "tool_calls", call.name, call.arguments

    async def messages(ours, theirs, opened):
        tool = {"name": "add", "input_schema": PARAMETERS}
        options = {"tools": [tool], "max_tokens": 99, **MODEL}
        answer = await theirs.messages.create(messages=HI, **options)
        (call,) = answer.content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
        chat = [*HI, {"role": "assistant", "content": answer.content}]
        await theirs.messages.create(
            messages=[*chat, {"role": "user", "content": [result]}], **options
        )
        return answer.stop_reason, call.name, '{"a": 1, "b": 2}' if call.input == {
            "a": 1, "b": 2
        } else call.input  # fmt: skip

    for act, ending in ((chat, "tool_calls"), (responses, "tool_calls"), (messages, "tool_use")):
        episode, found = through(act, [CALL, "3"])
        assert found == (ending, "add", '{"a": 1, "b": 2}')
        (trajectory,) = episode.trajectories
        assert decode(trajectory.response_ids) == f"{CALL}<stop>3<stop>"
        assert decode(trajectory.token_ids).endswith("<stop>tool:3|assistant:3<stop>")


def test_streams_say_what_whole_answers_say():
    async def act(ours, theirs, opened):
        usage = {"stream_options": {"include_usage": True}}
        async with ours.chat.completions.stream(
            messages=HI, tools=[TOOL], **MODEL, **usage
        ) as stream:
            async for _ in stream:
                pass
            chat = await stream.get_final_completion()
        async with ours.responses.stream(input="hi", tools=[{"type": "function", **TOOL["function"]}],
                                         **MODEL) as stream:  # fmt: skip
            kinds = [event.type async for event in stream]
            response = await stream.get_final_response()
        async with theirs.messages.stream(messages=HI, max_tokens=99, **MODEL) as stream:
            assert "".join([text async for text in stream.text_stream]) == "so"
            message = await stream.get_final_message()
        chunks = await ours.completions.create(prompt="ab", stream=True, **MODEL)
        text = "".join([chunk.choices[0].text async for chunk in chunks])
        return chat, kinds, response, message, text

    said = [
        f"<think>why</think>{CALL}", f"<think>why</think>hm{CALL}", "<think>why</think>so", "cd",
    ]  # fmt: skip
    _, (chat, kinds, response, message, text) = through(act, said)
    (choice,) = chat.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.parsed_arguments == {"a": 1, "b": 2}
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1, "b": 2}'
    assert chat.usage.total_tokens > chat.usage.completion_tokens > 40
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert (response.output_text, response.output[0].content[0].text) == ("hm", "why")
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.function_call_arguments.done" in kinds
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.stop_reason) == ("why", "end_turn")
    assert text == "cd"


def test_choices_stops_lengths_and_log_probabilities():
    async def act(ours, theirs, opened):
        chosen = await ours.chat.completions.create(messages=HI, n=3, logprobs=True, **MODEL)
        cut = await ours.completions.create(prompt="ab", max_tokens=2, logprobs=0, **MODEL)
        ended = await theirs.messages.create(
            messages=HI, max_tokens=9, stop_sequences=["cd"], **MODEL
        )
        more = await ours.responses.create(input="x", max_output_tokens=2, **MODEL)
        after = await ours.responses.create(input="y", previous_response_id=more.id, **MODEL)
        tokens = await ours.completions.create(
            prompt=[97, 98], extra_body={"return_token_ids": True}, **MODEL
        )
        return chosen, cut, ended, more, after, tokens

    episode, (chosen, cut, ended, more, after, tokens) = through(act, ["abcde"])
    assert [choice.message.content for choice in chosen.choices] == ["abcde"] * 3
    learnt = {tuple(trajectory.rollout_log_probs) for trajectory in episode.trajectories}
    for choice in chosen.choices:
        assert tuple(token.logprob for token in choice.logprobs.content) in learnt
        assert [token.token for token in choice.logprobs.content] == [*"abcde", "<stop>"]
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("ab", "length")
    assert tuple(cut.choices[0].logprobs.token_logprobs) in learnt
    assert (ended.content[0].text, ended.stop_reason, ended.stop_sequence) == (
        "ab", "stop_sequence", "cd"
    )  # fmt: skip
    assert (more.status, more.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert after.output_text == "abcde"
    assert tokens.choices[0].token_ids == [*map(ord, "abcde"), 0]
    assert len(episode.trajectories) == 7
    assert "user:x|assistant:ab|user:y|assistant:abcde<stop>" in [
        decode(trajectory.token_ids) for trajectory in episode.trajectories
    ]


def test_completions_go_on_from_what_was_sampled():
    async def act(ours, theirs, opened):
        prompt = "ab"
        for _ in range(3):
            answer = await ours.completions.create(prompt=prompt, **MODEL)
            prompt += answer.choices[0].text + "+"

    episode, _ = through(act, ["1", "2", "3"])
    (trajectory,) = episode.trajectories
    assert decode(trajectory.token_ids) == "ab1<stop>+2<stop>+3<stop>"
    assert trajectory.num_sampled == 6


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"top_p": 0.5}, "top_p"),
        ({"seed": "x"}, "seed"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": -1}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": [TOOL]},
         "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].function"),
        ({"tools": "add"}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages[0].tool_call_id"),
        ({"stream": "yes"}, "stream"),
        ({"made_up": 1}, "made_up"),
        ({"model": None}, "model"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_its_name(body, field):
    async def act(ours, theirs, opened):
        options = {"messages": HI, **MODEL, **body}
        with pytest.raises(openai.BadRequestError) as refused:
            await ours.post("/chat/completions", body=options, cast_to=object)
        return refused.value

    refused = unanswered(act)
    assert refused.param == field
    assert field in refused.message


class Listens(Says):
    """Keeps the grammar that each answer is asked for within."""

    def __init__(self, words):
        super().__init__(words)
        self.grammars = []

    def _answer(self, branch, ask):
        self.grammars.append(branch.episode.request(branch, ask).params.grammar)
        super()._answer(branch, ask)


def test_a_format_is_the_grammar_of_the_answer_in_every_protocol_that_has_one():
    draws = Listens(["yes"])
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    form = {"name": "x", "strict": True, "schema": schema}

    async def act(ours, theirs, opened):
        chat = {"type": "json_schema", "json_schema": form}
        await ours.chat.completions.create(messages=HI, response_format=chat, **MODEL)
        text = {"format": {"type": "json_schema", **form}}
        await ours.responses.create(input="hi", text=text, **MODEL)
        plain = {"type": "text"}
        await ours.chat.completions.create(messages=HI, response_format=plain, **MODEL)
        chat = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
        with pytest.raises(openai.BadRequestError, match=r"cannot be held to it \(.*not would be"):
            await ours.chat.completions.create(messages=HI, response_format=chat, **MODEL)

    through(act, draws=draws, parser=AnswerParser(), holds_grammars=lambda: True)
    told = [grammar and json.loads(grammar.text) for grammar in draws.grammars]
    assert told == [schema, schema, None]
    assert list(told[0]["properties"]) == ["b", "a"]
    assert draws.grammars[0].kind == "json_schema" and draws.grammars[0].stop_token_ids == (0,)


def test_a_call_that_is_forced_is_the_grammar_of_the_answer_in_every_protocol():
    named = {"type": "function", "function": {"name": "add"}}
    flat = {"type": "function", **TOOL["function"]}
    theirs_tool = {"name": "add", "input_schema": PARAMETERS}

    async def act(ours, theirs, opened):
        chat, responses = ours.chat.completions.create, ours.responses.create
        messages = partial(theirs.messages.create, messages=HI, max_tokens=99, tools=[theirs_tool])
        return [
            (await chat(messages=HI, tools=[TOOL], tool_choice="required", **MODEL)).choices[0],
            await chat(messages=HI, tools=[TOOL], tool_choice=named, **MODEL),
            await chat(messages=HI, tools=[TOOL], parallel_tool_calls=False, **MODEL),
            await responses(input="hi", tools=[flat], tool_choice="required", **MODEL),
            await messages(tool_choice={"type": "any"}, **MODEL),
            await messages(tool_choice={"type": "tool", "name": "add"}, **MODEL),
            await messages(
                tool_choice={"type": "auto", "disable_parallel_tool_use": True}, **MODEL
            ),
            await chat(messages=HI, tools=[TOOL], tool_choice="none", **MODEL),
        ]

    draws = Listens([CALL])
    parser = AnswerParser(tool_call_parser="qwen25")
    _, said = through(act, draws=draws, parser=parser, holds_grammars=lambda: True)
    *held, free = draws.grammars
    assert free is None and {grammar.kind for grammar in held} == {"structural_tag"}
    forms = [json.loads(grammar.text)["format"] for grammar in held]
    asked = [(form["at_least_one"], form["stop_after_first"]) for form in forms]
    must, one = (True, False), (False, True)
    assert asked == [must, must, one, must, must, must, one]
    assert said[0].message.tool_calls[0].function.name == "add"
    assert (said[3].tool_choice, said[4].stop_reason) == ("required", "tool_use")


IN_FORM = '<tool_call>\n{"name":"add", "arguments":{"a": 1}}\n</tool_call>'


def test_a_call_or_a_format_may_come_after_reasoning():
    async def act(ours, theirs, opened):
        ask = ours.chat.completions.create
        form = {"type": "json_object"}
        await ask(messages=HI, tools=[TOOL], tool_choice="required", **MODEL)
        return await ask(messages=HI, response_format=form, **MODEL)

    draws = Listens(["<think>hm</think>\n\n{}"])
    _, said = through(act, draws=draws, holds_grammars=lambda: True)
    assert (said.choices[0].message.content.strip(), said.choices[0].message.reasoning_content) == (
        "{}", "hm",
    )  # fmt: skip
    for grammar, text in zip(draws.grammars, [IN_FORM, "{}"], strict=True):
        held = Grammar.from_structural_tag(grammar.text)
        assert all(accepts(held, f"{before}{text}") for before in ("", "<think>hm</think>\n\n")), (
            text
        )
        assert not accepts(held, "<think>hm</think>") and not accepts(held, f"hm</think>{text}")


@pytest.mark.parametrize("one", [{}, {"parallel_tool_calls": False}])
def test_beside_a_format_tools_may_be_called(one):
    """As at OpenAI: the format is that of an answer that calls nothing (vllm-project/vllm#39929)."""
    said = '{"b": "<tool_call>"}'

    async def act(ours, theirs, opened):
        ask = partial(ours.chat.completions.create, response_format={"type": "json_object"})
        asked = [await ask(messages=HI, tools=[TOOL], **one, **MODEL) for _ in range(2)]
        return [each.choices[0] for each in asked]

    draws = Listens([f"<think>hm</think>{IN_FORM}", said])
    _, (calls, formats) = through(act, draws=draws, holds_grammars=lambda: True)
    assert calls.finish_reason == "tool_calls" and not calls.message.content
    assert (formats.finish_reason, formats.message.content) == ("stop", said)
    for grammar in draws.grammars:
        held = Grammar.from_structural_tag(grammar.text)
        for before in ("", "<think>hm</think>\n\n"):
            assert accepts(held, f"{before}{IN_FORM}") and accepts(held, f"{before}{said}")
            assert not accepts(held, f"{before}hi")
        assert accepts(held, IN_FORM + IN_FORM) == (not one)


class OpensThinking(SpelledOut):
    """A template that begins the reasoning in the prompt."""

    def begin(self, messages, tools):
        return [*super().begin(messages, tools), *self.encode("<think>\n")]


@pytest.mark.parametrize("parser", ["qwen3", "nemotron_3", "deepseek-r1"])
def test_reasoning_that_the_prompt_has_begun_is_told_from_the_answer(parser):
    async def act(ours, theirs, opened):
        return await ours.chat.completions.create(messages=HI, **MODEL)

    said = ["Let me think.\n</think>\n\nIt is 42."]
    options = {"parser": AnswerParser(reasoning_parser=parser), "template": OpensThinking()}
    _, answer = through(act, said, **options)
    message = answer.choices[0].message
    assert message.content.strip() == "It is 42."
    assert message.reasoning_content.strip() == "Let me think."


def test_a_greedy_temperature_and_a_seed_are_the_runs_and_that_is_said_once(caplog):
    async def act(ours, theirs, opened):
        for seed in (1, 2):
            await ours.chat.completions.create(messages=HI, temperature=0, seed=seed, **MODEL)
        await theirs.messages.create(
            messages=HI, max_tokens=5, extra_body={"temperature": 0}, **MODEL
        )

    episode, _ = through(act)
    assert {t for each in episode.trajectories for t in each.temperatures} == {1.0}
    told = [r.getMessage() for r in caplog.records if "a client of the gateway" in r.getMessage()]
    assert [message.partition(";")[0].split()[-1] for message in told] == [
        "seed=1",
        "temperature=0",
    ]


def test_reasoning_is_packed_for_clients_that_give_nothing_else_of_it_back():
    async def act(ours, theirs, opened):
        asked = {"include": ["reasoning.encrypted_content"], **MODEL}
        first = await ours.responses.create(input=HI, **asked)
        packed = {**first.output[0].model_dump(exclude_none=True), "content": []}
        more = [*HI, packed, first.output[1], {"role": "user", "content": "more"}]
        await ours.responses.create(input=more, **asked)
        for given in ({"include": ["file_search_call.results"]}, {"reasoning": {"effort": "low"}},
                      {"text": {"verbosity": "low"}}):  # fmt: skip
            with pytest.raises(
                openai.BadRequestError, match=r"include|chat-template-kwargs|verbosity"
            ):
                await ours.responses.create(input="hi", **MODEL, **given)
        with pytest.raises(anthropic.BadRequestError, match="--chat-template-kwargs"):
            thinking = {"type": "enabled", "budget_tokens": 1024}
            await theirs.messages.create(messages=HI, max_tokens=2000, thinking=thinking, **MODEL)
        assert opened.session.num_loose_matches == 0

    episode, _ = through(act, ["<think>why</think>so"])
    assert len(episode.trajectories) == 1


def test_a_mark_of_what_to_cache_on_the_whole_request_changes_nothing():
    """As doublewordai/control-layer#1239 had to let it through before an upstream refused it."""

    async def act(ours, theirs, opened):
        asked = {"messages": HI, "max_tokens": 5, **MODEL}
        return await theirs.messages.create(cache_control={"type": "ephemeral"}, **asked)

    _, answer = through(act, ["one"])
    assert answer.content[0].text == "one"


def test_tokens_are_counted_and_what_is_not_served_is_refused_in_json():
    async def act(ours, theirs, opened):
        counted = await theirs.messages.count_tokens(messages=HI, system="be", **MODEL)
        said = await theirs.messages.create(messages=HI, system="be", max_tokens=5, **MODEL)
        assert counted.input_tokens == said.usage.input_tokens
        with pytest.raises(
            openai.NotFoundError, match=r"Nothing is served at .*embeddings"
        ) as missing:
            await ours.embeddings.create(input="x", **MODEL)
        assert missing.value.code == "not_found"
        with pytest.raises(openai.APIStatusError, match="GET is not served") as wrong:
            await ours.get("/chat/completions", cast_to=object)
        assert (wrong.value.status_code, wrong.value.code) == (405, "method_not_allowed")
        with pytest.raises(anthropic.NotFoundError) as theirs_missing:
            await theirs.get("/v1/files", cast_to=object)
        assert theirs_missing.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await theirs.messages.count_tokens(messages=HI, model="claude")

    through(act)


HARMONY = AnswerParser(tool_call_parser="gpt-oss", reasoning_parser="gpt-oss")
CALLED = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
CALLED += 'to=functions.add <|constrain|>json<|message|>{"a": 6}'


def test_calls_of_gpt_oss_are_found_whichever_token_ends_them():
    async def act(ours, theirs, opened):
        ask = ours.chat.completions.create
        return [(await ask(messages=HI, tools=[TOOL], **MODEL)).choices[0] for _ in range(3)]

    said = [CALLED, "<|channel|>final<|message|>hi", "plain"]
    _, (called, final, plain) = through(act, said, parser=HARMONY)
    (made,) = called.message.tool_calls
    assert (made.function.name, made.function.arguments) == ("add", '{"a": 6}')
    assert (called.finish_reason, called.message.reasoning_content) == ("tool_calls", "hm")
    assert (final.message.content, plain.message.content) == ("hi", "plain")


@pytest.mark.parametrize("reasoning_parser", ["", "gpt-oss"])
def test_a_call_of_gpt_oss_without_an_analysis_is_found(reasoning_parser):
    async def act(ours, theirs, opened):
        return await ours.chat.completions.create(messages=HI, tools=[TOOL], **MODEL)

    parser = AnswerParser(tool_call_parser="gpt-oss", reasoning_parser=reasoning_parser)
    _, said = through(act, [CALLED.rpartition("<|start|>assistant")[2]], parser=parser)
    (made,) = said.choices[0].message.tool_calls
    assert (made.function.name, made.function.arguments) == ("add", '{"a": 6}')
    assert not said.choices[0].message.content


def test_a_call_of_gpt_oss_that_was_cut_off_is_none():
    async def act(ours, theirs, opened):
        ask = ours.chat.completions.create
        return await ask(messages=HI, tools=[TOOL], max_tokens=len(CALLED) - 1, **MODEL)

    _, said = through(act, [CALLED], parser=HARMONY)
    assert (said.choices[0].finish_reason, said.choices[0].message.tool_calls) == ("length", None)


def test_errors_are_those_that_clients_know():
    async def act(ours, theirs, opened):
        long = [{"role": "user", "content": "x" * 200}]
        with pytest.raises(openai.BadRequestError) as exceeded:
            await ours.chat.completions.create(messages=long, **MODEL)
        assert exceeded.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
            await theirs.messages.create(messages=long, max_tokens=5, **MODEL)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await ours.chat.completions.create(messages=HI, model="gpt-5")
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await theirs.messages.create(messages=HI, max_tokens=5, model="claude")
        with pytest.raises(openai.RateLimitError, match="3 may be at once"):
            await ours.chat.completions.create(messages=HI, n=4, **MODEL)
        with pytest.raises(openai.NotFoundError, match="Previous response"):
            await ours.responses.create(input="x", previous_response_id="resp_1", **MODEL)
        with pytest.raises(openai.AuthenticationError):
            await ours.copy(api_key="guessed").chat.completions.create(messages=HI, **MODEL)
        with pytest.raises(anthropic.AuthenticationError):
            await theirs.copy(api_key="guessed").messages.create(messages=HI, max_tokens=5, **MODEL)
        assert [model.id async for model in ours.models.list()] == ["policy"]
        assert opened.session.num_refused == 6

    unanswered(act, most_at_once=3, max_context_len=100)


def unanswered(act, **more):
    """What `act` returns, which ends in an error: where no token is sampled there is no episode."""
    found = []

    async def kept(*given):
        found.append(await act(*given))

    with pytest.raises(AgentError):
        through(kept, **more)
    return found[0]


def test_a_client_gets_the_bytes_of_tokens_and_not_those_of_their_text():
    async def act(ours, theirs, opened):
        return await ours.chat.completions.create(messages=HI, logprobs=True, **MODEL)

    parts = [b"\xe8", b"\xaa", b"\x9e"]
    for read_bytes, expected in ((None, b"yes"), (lambda ids: (parts * 2)[: len(ids)], b"")):
        _, answer = through(act, parser=AnswerParser(read_bytes=read_bytes))
        found = [bytes(each.bytes) for each in answer.choices[0].logprobs.content]
        assert b"".join(found).startswith(expected or b"".join(parts))
