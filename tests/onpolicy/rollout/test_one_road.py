"""One road from a row to tokens: whatever kind of file holds it, and whoever reads it."""

import csv
import json
import logging
import tracemalloc
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onpolicy.chat.template import ChatTemplate
from onpolicy.config.groups import DataConfig
from onpolicy.config.sft_flags import AnswersConfig
from onpolicy.errors import ConfigError
from onpolicy.rollout.data_files import read_rows
from onpolicy.rollout.prompts import Read, load_prompts
from onpolicy.run.supervised.answers import load_examples
from tests.support.chat_tokenizers import END, byte_tokenizer, real_tokenizer

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }};{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
"""Writes content that is text, as Qwen3 does, and asks for the fields of a message, as Llama does."""

TOKENIZER = byte_tokenizer(TEMPLATE)
STOPS = (TOKENIZER.convert_tokens_to_ids(END),)
ASKED = {"role": "user", "content": "What is 12 times 7?"}


def calling(name, arguments, **more):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}], **more}


def lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(rows):
    return pyarrow.Table.from_pylist(rows)


def write_arrow(file, rows):
    with pyarrow.ipc.new_file(str(file), table(rows).schema) as writer:
        writer.write_table(table(rows))


def write_csv(file, rows):
    names = dict.fromkeys(name for row in rows for name in row)
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, names, restval="")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()})


WRITERS = {
    "a.jsonl": lines,
    "a.json": lambda file, rows: file.write_text(json.dumps(rows)),
    "a.parquet": lambda file, rows: pyarrow.parquet.write_table(
        table(rows), file, row_group_size=2
    ),
    "a.arrow": write_arrow,
    "saved": lambda file, rows: Dataset.from_list(rows).save_to_disk(str(file)),
    "a.csv": write_csv,
}


def prompts_of(file, **config):
    config = DataConfig(apply_chat_template=True, **config)
    return load_prompts(str(file), config, TOKENIZER, 100_000)


def examples_of(file, **config):
    config = AnswersConfig(prompt_data=str(file), apply_chat_template=True, **config)
    return load_examples(str(file), config, TOKENIZER, STOPS, 100_000, "--prompt-data")


ARGUMENTS = {
    "a": st.integers(-9, 9),
    "city": st.text(max_size=4),
    "units": st.lists(st.text("kmh", max_size=2), max_size=2),
    "x": st.fixed_dictionaries({"y": st.booleans()}),
}
"""A column of Arrow's has one type, and one order of fields, which that of this table is."""


@st.composite
def arguments(draw):
    names = draw(st.sets(st.sampled_from([*ARGUMENTS])))
    return {name: draw(value) for name, value in ARGUMENTS.items() if name in names}


WORDS = st.text("ab \n\u2028\x0c\u00e9,\"'[{", min_size=1, max_size=8)


@st.composite
def chats(draw):
    """A question, maybe a call and its result, maybe more of them, and the question that is answered."""
    chat = [{"role": "user", "content": draw(WORDS)}]
    for _ in range(draw(st.integers(0, 2))):
        chat.append(calling(draw(st.sampled_from(["add", "look"])), draw(arguments())))
        chat.append({"role": "tool", "content": draw(WORDS)})
    if draw(st.booleans()):
        chat.insert(0, {"role": "system", "content": draw(WORDS)})
    return chat


def tool(name, properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


EVERY_FIELD = {"a": 1, "city": "Oslo", "units": ["km"], "x": {"y": True}}
TOOLS = [[tool("add", {"a": {"type": "number"}})], [tool("look", {"city": {"enum": ["Oslo"]}})]]
FIRST = [{"role": "system", "content": "Be brief."}, ASKED, calling("add", EVERY_FIELD)]
FIRST += [{"role": "tool", "content": "84"}]


@st.composite
def rows(draw):
    drawn = draw(st.lists(st.tuples(chats(), st.sampled_from([[], *TOOLS])), max_size=4))
    found = [{"prompt": FIRST, "label": "0", "tools": TOOLS[0] + TOOLS[1]}]
    for number, (chat, tools) in enumerate(drawn, 1):
        found.append({"prompt": chat, "label": f"n{number}"} | ({"tools": tools} if tools else {}))
    return found


QUICKLY = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "a.jsonl"])
@QUICKLY
@given(rows=rows())
def test_a_row_gives_the_same_tokens_from_every_kind_of_file(tmp_path_factory, name, rows):
    directory = tmp_path_factory.mktemp("rows")
    lines(directory / "a.jsonl", rows)
    WRITERS[name](directory / name, rows)
    expected, found = prompts_of(directory / "a.jsonl"), prompts_of(directory / name)
    assert [(p.prompt_ids, p.label) for p in found] == [(p.prompt_ids, p.label) for p in expected]
    learnt, others = examples_of(directory / "a.jsonl"), examples_of(directory / name)
    assert [e.trajectories for e in others] == [e.trajectories for e in learnt]


@QUICKLY
@given(rows=rows())
def test_train_sft_and_agents_read_a_row_alike(tmp_path_factory, rows):
    file = tmp_path_factory.mktemp("rows") / "a.jsonl"
    lines(file, rows)
    template = ChatTemplate(TOKENIZER, STOPS)
    for row, prompt, example in zip(rows, prompts_of(file), examples_of(file), strict=True):
        assert prompt.prompt_ids == template.begin(row["prompt"], row.get("tools", ()))
        learnt = example.trajectories[-1]
        assert TOKENIZER.decode(learnt.token_ids).startswith(prompt.text)


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "a.csv"])
def test_parts_of_text_are_one_text(tmp_path, name):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "12 times 7?"}]
    WRITERS[name](tmp_path / name, [{"prompt": [{**ASKED, "content": parts}], "label": "84"}])
    (prompt,) = prompts_of(tmp_path / name)
    assert prompt.text == "<|im_start|>user\nWhat is 12 times 7?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.messages == [ASKED]


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ({"role": "user", "content": [{"type": "image", "image": "a.png"}]}, "type='image'"),
        ({"role": "user", "content": [{"type": "image", "text": "a cat"}]}, "type='image'"),
        ({"role": "user", "content": ["What?"]}, "type='str'"),
        ({"role": "user"}, "content=None, and it must be text"),
        ({"role": "user", "content": None}, "content=None, and it must be text"),
        ({"role": "user", "content": 5}, "content=5, and it must be text"),
        ({"role": "user", "content": {"text": "a"}}, "and it must be text"),
        ({"role": "user", "content": ""}, "nothing is asked"),
        ({"role": "user", "content": []}, "nothing is asked"),
        ({"content": "What?"}, "objects with a role and a content"),
        ({"from": "human", "value": "What?"}, "objects with a role and a content"),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "a function that has a name"),
        ({"role": "assistant", "tool_calls": "add"}, "a function that has a name"),
    ],
)
def test_a_message_that_would_not_reach_the_policy_is_refused(tmp_path, message, rule):
    lines(tmp_path / "a.jsonl", [{"prompt": [message], "label": "84"}])
    with pytest.raises(ConfigError, match=rule):
        prompts_of(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=rule):
        examples_of(tmp_path / "a.jsonl")


def test_what_people_wrote_as_null_is_absent_in_a_message_and_a_value_in_arguments(tmp_path):
    nulls = {"name": None, "reasoning_content": None, "tool_calls": None}
    chat = [{**ASKED, **nulls}, calling("add", {"a": None}), {"role": "tool", "content": "1"}]
    lines(tmp_path / "a.jsonl", [{"prompt": chat, "label": "84"}])
    (prompt,) = prompts_of(tmp_path / "a.jsonl")
    assert '<call>add {"a": null}</call>' in prompt.text
    assert prompt.messages[0] == ASKED


@pytest.mark.parametrize(
    "given", ['{"a": 1}', {"a": 1}, '{"a":1}'], ids=["text", "object", "other text"]
)
def test_arguments_are_written_once_whether_they_are_text_or_an_object(tmp_path, given):
    chat = [ASKED, calling("add", given), {"role": "tool", "content": "1"}]
    lines(tmp_path / "a.jsonl", [{"prompt": chat, "label": "84"}])
    assert '<call>add {"a": 1}</call>' in prompts_of(tmp_path / "a.jsonl")[0].text
    chat[1]["tool_calls"] = json.dumps(chat[1]["tool_calls"])
    lines(tmp_path / "b.jsonl", [{"prompt": chat, "label": "84"}])
    assert '<call>add {"a": 1}</call>' in prompts_of(tmp_path / "b.jsonl")[0].text


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("qwen3", '{"name": "add", "arguments": {"a": 1}}'),
        ("deepseek_v3", '```json\n{"a": 1}\n```'),
    ],
)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
@pytest.mark.parametrize("given", ['{"a": 1}', {"a": 1}], ids=["text", "object"])
def test_published_templates_write_calls_in_the_form_that_each_reads(
    tmp_path, name, written, content, given
):
    """Qwen3's searches the content, which must be text; DeepSeek-V3's wants none, and text arguments."""
    chat = [ASKED, calling("add", given, **content), {"role": "tool", "content": "1"}]
    lines(tmp_path / "a.jsonl", [{"prompt": chat, "label": "84"}])
    config = DataConfig(apply_chat_template=True)
    (prompt,) = load_prompts(str(tmp_path / "a.jsonl"), config, real_tokenizer(name), 1000)
    assert written in prompt.text


def test_rows_that_differ_in_what_policy_or_reward_are_given_are_all_kept(tmp_path, caplog):
    row = {"prompt": "Do it", "label": ""}
    rows = [{**row, "tools": tools} for tools in TOOLS]
    rows += [{**row, "tests": {"cases": [[number, "x"]], "id": number}} for number in (1, 2)]
    again = [{**row, "tests": {"id": 3, "cases": [[1, "x"]]}, "index": 7}]
    lines(tmp_path / "a.jsonl", rows + again)
    with caplog.at_level(logging.INFO):
        assert len(prompts_of(tmp_path / "a.jsonl")) == 4
    assert "1 of 5 rows repeat an earlier one" in caplog.text
    config = DataConfig(apply_chat_template=True)
    given = (str(tmp_path / "a.jsonl"), config, TOKENIZER, 1000)
    assert len(load_prompts(*given, read=Read(fields=False))) == 3


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (42.0, "42"), (1e22, "10000000000000000000000"), (-3.0, "-3"), (0.5, "0.5"),
        (Decimal("42.00"), "42"), (Decimal("0.50"), "0.50"), (42, "42"), ("042.0", "042.0"),
    ],
)  # fmt: skip
def test_a_label_that_is_a_whole_number_has_no_fraction(tmp_path, label, text):
    WRITERS["a.parquet"](tmp_path / "a.parquet", [{"prompt": "6*7=", "label": label}])
    assert prompts_of(tmp_path / "a.parquet")[0].label == text


def test_a_label_of_32_bits_has_the_digits_that_were_written(tmp_path):
    column = pyarrow.array([0.1], pyarrow.float32())
    rows = pyarrow.table({"prompt": ["1/10="], "reward_model": [{"ground_truth": 0}]})
    rows = rows.set_column(
        1, "reward_model", pyarrow.StructArray.from_arrays([column], ["ground_truth"])
    )
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet")
    assert prompts_of(tmp_path / "a.parquet")[0].label == "0.1"


@pytest.mark.parametrize("label", [float("nan"), float("inf")])
def test_a_label_that_is_no_finite_number_is_refused(tmp_path, label):
    WRITERS["a.parquet"](tmp_path / "a.parquet", [{"prompt": "6*7=", "label": label}])
    with pytest.raises(
        ConfigError, match=r"label=(nan|inf)\. A label must be a string or a finite"
    ):
        prompts_of(tmp_path / "a.parquet")


def test_a_row_needs_a_label_only_where_something_reads_it(tmp_path):
    lines(tmp_path / "a.jsonl", [{"prompt": "6*7="}])
    config = DataConfig(apply_chat_template=True)
    given = (str(tmp_path / "a.jsonl"), config, TOKENIZER, 1000)
    (prompt,) = load_prompts(*given, read=Read(label=False))
    assert prompt.label == ""
    lines(tmp_path / "b.jsonl", [{"prompt": "6*7=", "reward_model": {"style": "model"}}])
    (prompt,) = load_prompts(str(tmp_path / "b.jsonl"), *given[1:], read=Read(label=False))
    assert prompt.label == ""
    with pytest.raises(ConfigError, match="no field 'label'"):
        load_prompts(*given)
    named = DataConfig(apply_chat_template=True, label_key="answer")
    with pytest.raises(ConfigError, match="no field 'answer'"):
        load_prompts(given[0], named, *given[2:], read=Read(label=False))


def test_a_text_that_has_its_beginning_already_gets_no_second_one(tmp_path):
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tokenizer.add_bos_token = True
    begin = tokenizer.convert_tokens_to_ids("<|begin|>")
    assert tokenizer.encode("a")[0] == begin
    texts = ["<|begin|>6*7=", "6*7="]
    lines(tmp_path / "a.jsonl", [{"prompt": text, "label": text} for text in texts])
    for prompt in load_prompts(str(tmp_path / "a.jsonl"), DataConfig(), tokenizer, 100):
        assert prompt.prompt_ids.count(begin) == 1
    config = AnswersConfig(prompt_data=str(tmp_path / "a.jsonl"))
    given = (str(tmp_path / "a.jsonl"), config, tokenizer, STOPS, 100, "--prompt-data")
    for example in load_examples(*given):
        assert example.trajectories[0].prompt_ids.count(begin) == 1


@pytest.mark.parametrize("size", [1 << 18, 3 << 20])
def test_a_field_of_csv_may_be_of_any_size_and_hold_what_ends_no_line(tmp_path, size):
    text = "first\u2028second\u2029\x0b\x0c\x1c\x85" + "a" * size
    write_csv(tmp_path / "a.csv", [{"prompt": text, "label": "7"}])
    (prompt,) = load_prompts(str(tmp_path / "a.csv"), DataConfig(), TOKENIZER, 1 << 23)
    assert prompt.text == text


@pytest.mark.parametrize("name", ["a.csv", "a.arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path, name):
    if name == "a.csv":
        (tmp_path / name).write_text("prompt,label,label\na,1,2\n")
    else:
        arrays = [pyarrow.array(["a"])] * 2
        both = pyarrow.Table.from_arrays(arrays, names=["label", "label"])
        with pyarrow.ipc.new_file(str(tmp_path / name), both.schema) as writer:
            writer.write_table(both)
    with pytest.raises(ConfigError, match="two columns have the name 'label'"):
        prompts_of(tmp_path / name)


def test_a_chat_that_ends_with_an_answer_goes_on_with_it(tmp_path):
    begun = {"role": "assistant", "content": "Let me see: 12 times 7 is "}
    lines(tmp_path / "a.jsonl", [{"prompt": [ASKED, begun], "label": "84"}])
    (prompt,) = prompts_of(tmp_path / "a.jsonl")
    assert prompt.text.endswith("<|im_start|>assistant\nLet me see: 12 times 7 is ")


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            [{"role": "system", "content": "Be brief."}, ASKED], "leaves out what role=system says"),
        ("{% for m in messages %}{{ m.content or '' }}{% endfor %}",
            [ASKED, calling("add", {"a": 1}), {"role": "tool", "content": "1"}],
            "leaves out the call of 'add'"),
    ],
)  # fmt: skip
def test_a_template_that_drops_a_message_is_refused(tmp_path, template, chat, message):
    lines(tmp_path / "a.jsonl", [{"prompt": chat, "label": "84"}])
    config = DataConfig(apply_chat_template=True)
    with pytest.raises(ConfigError, match=message):
        load_prompts(str(tmp_path / "a.jsonl"), config, byte_tokenizer(template), 1000)


def test_a_developer_is_the_system_where_a_template_knows_none(tmp_path):
    chat = [{"role": "developer", "content": "Be brief."}, ASKED]
    lines(tmp_path / "a.jsonl", [{"prompt": chat, "label": "84"}])
    assert prompts_of(tmp_path / "a.jsonl")[0].text.startswith("<|im_start|>system\nBe brief.")


def test_variables_of_the_template_reach_prompts_and_answers(tmp_path):
    lines(tmp_path / "a.jsonl", [{"prompt": [ASKED], "label": "84"}])
    off = {"chat_template_kwargs": '{"enable_thinking": false}'}
    (prompt,) = prompts_of(tmp_path / "a.jsonl", **off)
    assert prompt.text.endswith("assistant\n<think></think>")
    with pytest.raises(ConfigError, match="reads no variable 'enable_thinkng'"):
        prompts_of(tmp_path / "a.jsonl", chat_template_kwargs='{"enable_thinkng": false}')
    with pytest.raises(ConfigError, match="'messages' is set by onpolicy"):
        prompts_of(tmp_path / "a.jsonl", chat_template_kwargs='{"messages": []}')


def test_an_answer_that_holds_the_text_of_a_stop_token_is_learnt_whole(tmp_path):
    text = f"It is {END} in ChatML, {END} twice."
    chat = [ASKED, {"role": "assistant", "content": text}]
    lines(tmp_path / "a.jsonl", [{"prompt": [*chat, *chat]}])
    (example,) = examples_of(tmp_path / "a.jsonl")
    (trajectory,) = example.trajectories
    assert example.prompt.label == f"{text}{END}" * 2
    learnt = trajectory.response_ids
    assert learnt.count(STOPS[0]) == 2 and learnt[-1] == STOPS[0]


@pytest.mark.parametrize("content", ["", None])
def test_an_answer_of_nothing_is_refused(tmp_path, content):
    chat = [ASKED, {"role": "assistant", "content": content}]
    lines(tmp_path / "a.jsonl", [{"prompt": chat}])
    with pytest.raises(ConfigError, match=r"nothing is to be learnt|content=None, and it must be"):
        examples_of(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_is_never_held_whole_as_objects(tmp_path, name):
    num_rows, text = 20_000, "a" * 1000
    WRITERS[name](tmp_path / name, [{"prompt": text, "label": "1"}] * num_rows)
    tracemalloc.start()
    found = sum(len(row["prompt"]) for _, row in read_rows(tmp_path / name, "x"))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == num_rows * len(text)
    assert most < found / 4
