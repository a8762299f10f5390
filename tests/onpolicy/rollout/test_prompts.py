import json

import pyarrow
import pyarrow.parquet
import pytest

from onpolicy.config.groups import DataConfig
from onpolicy.errors import ConfigError
from onpolicy.rollout.prompts import load_prompts
from tests.support.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
CHAT = make_tokenizer()
CHAT.chat_template = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows):
        file = tmp_path / "data.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    return write


def load(path, tokenizer=TOKENIZER, max_prompt_len=20, **config):
    return load_prompts(path, DataConfig(**config), tokenizer, max_prompt_len)


def test_rows_become_prompts_in_the_files_order(jsonl):
    prompts = load(
        jsonl({"prompt": "ab", "label": 3, "source": "x"}, {"prompt": "cd", "label": "4"})
    )
    assert [(p.index, p.text, p.label) for p in prompts] == [(0, "ab", "3"), (1, "cd", "4")]
    assert prompts[0].prompt_ids == TOKENIZER.encode("ab")
    assert prompts[0].metadata == {"source": "x"}


def test_keys_are_chosen_and_dots_reach_into_objects(jsonl):
    path = jsonl({"question": "ab", "answer": {"value": 7}})
    assert load(path, input_key="question", label_key="answer.value")[0].label == "7"


VERL_ROW = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "1+1"}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": "a"},
}


def test_the_layout_of_dapo_math_17k_loads_and_repetitions_are_dropped(tmp_path):
    rows = [VERL_ROW, {**VERL_ROW, "extra_info": {"index": "b"}}]
    rows.append({**VERL_ROW, "prompt": [{"role": "user", "content": "1+2"}]})
    file = tmp_path / "dapo.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    prompts = load(str(file), CHAT, apply_chat_template=True)
    assert [(p.text, p.label) for p in prompts] == [("u:1+1;a:", "2"), ("u:1+2;a:", "2")]


def test_a_string_becomes_a_chat_of_one_message(jsonl):
    prompts = load(jsonl({"prompt": "ab", "label": 1}), CHAT, apply_chat_template=True)
    assert prompts[0].text == "u:ab;a:"


@pytest.mark.parametrize(
    ("rows", "config", "message"),
    [
        (["{"], {}, r"data.jsonl:1: not valid JSON"),
        ([{"prompt": "a", "label": 1}, ""], {}, r"data.jsonl:2: an empty line"),
        (["[1]"], {}, r"data.jsonl:1: list. Every line must be an object"),
        ([{"prompt": "a"}], {}, r"data.jsonl:1: no field 'label'; the row has prompt"),
        ([{"prompt": "a", "label": None}], {}, "label=None. A label must be"),
        ([{"prompt": "", "label": 1}], {}, "prompt=''"),
        ([{"prompt": "a" * 21, "label": 1}], {}, "data.jsonl:1: the prompt has 21 tokens.* 20"),
        ([{"prompt": VERL_ROW["prompt"], "label": 1}], {}, "Add --apply-chat-template"),
        ([{"prompt": "a", "label": 1}], {"apply_chat_template": True}, "no chat template"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_and_line(jsonl, rows, config, message):
    with pytest.raises(ConfigError, match=message):
        load(jsonl(*rows), **config)


def test_files_that_are_missing_empty_or_of_another_kind_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "data.txt").touch()
    (tmp_path / "bad.parquet").write_text("no")
    for name, message in [
        ("none.jsonl", "No such file"),
        ("empty.jsonl", "no rows"),
        ("data.txt", "unknown kind '.txt'"),
        ("bad.parquet", "bad.parquet: cannot be read"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load(str(tmp_path / name))


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"x": {}}}}}]
WITH_TOOLS, ANY_TOOL = make_tokenizer(), make_tokenizer()
WITH_TOOLS.chat_template = (
    "{% for t in tools or [] %}{{ t.function | tojson }};{% endfor %}" + CHAT.chat_template
)
ANY_TOOL.chat_template = WITH_TOOLS.chat_template.replace("t.function", "t")


def test_a_rows_tools_go_into_its_template(jsonl):
    messages = [{"role": "user", "content": "1"}]
    rows = [
        {"messages": messages, "label": 1},
        {"messages": messages, "label": 2, "tools": TOOLS},
        {"messages": messages, "label": 3, "tools": json.dumps(TOOLS)},
    ]
    keys = {"input_key": "messages", "apply_chat_template": True, "max_prompt_len": 200}
    plain, given, as_text = load(jsonl(*rows), WITH_TOOLS, **keys)
    assert plain.text == "u:1;a:"
    assert given.text == as_text.text
    assert given.text.startswith('{"name": "add", "parameters": {"properties": {"x": {}}}};')


def test_arrow_fills_no_field_into_a_tool(tmp_path):
    def row(name, kind):
        parameters = {"properties": {name: {"type": kind}}}
        return {"prompt": "1", "label": name, "tools": [{"parameters": parameters}]}

    file = tmp_path / "tools.parquet"
    rows = [row("x", "number"), row("y", "string")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    first, _ = load(str(file), ANY_TOOL, 200, apply_chat_template=True)
    assert first.text == '{"parameters": {"properties": {"x": {"type": "number"}}}};u:1;a:'


@pytest.mark.parametrize("tools", ["add", 3, ["add"], {"name": "add"}])
def test_what_is_no_list_of_tools_is_refused(jsonl, tools):
    row = {"prompt": "a", "label": 1, "tools": tools}
    with pytest.raises(ConfigError, match=r"data.jsonl:1: tools=.* must be a list of JSON schemas"):
        load(jsonl(row), WITH_TOOLS, apply_chat_template=True)
    assert load(jsonl(row))[0].metadata == {"tools": tools}


def test_a_template_without_tools_is_refused(jsonl):
    with pytest.raises(ConfigError, match="template writes none of them"):
        load(jsonl({"prompt": "a", "label": 1, "tools": TOOLS}), CHAT, apply_chat_template=True)
