import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from onpolicy.config.groups import DataConfig
from onpolicy.errors import ConfigError
from onpolicy.rollout import generated_prompts
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
        ([{"prompt": "a" * 21, "label": 1}], {}, "data.jsonl:1: the prompt has 21 tokens.* 20"),
        ([{"prompt": VERL_ROW["prompt"], "label": 1}], {}, "Add --apply-chat-template"),
        ([{"prompt": "a", "label": 1}], {"apply_chat_template": True}, "no chat template"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_and_line(jsonl, rows, config, message):
    with pytest.raises(ConfigError, match=message):
        load(jsonl(*rows), **config)


@pytest.mark.parametrize("field", ["images", "videos", "audios"])
def test_a_row_with_more_than_text_is_refused_unless_its_field_is_empty(jsonl, field):
    row = {"prompt": "<image>ab", "label": "x"}
    assert len(load(jsonl({**row, field: []}, {**row, "label": "y", field: None}))) == 2
    with pytest.raises(ConfigError, match=f":2: has {field}, and a run reads and trains text"):
        load(jsonl(row, {**row, field: [{"path": "a.png"}]}))


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


NAMES = "reasoning-gym:chain_sum,leg_counting"


def questions(source=NAMES, size=3, seed=0, flag="--prompt-data"):
    return [row["prompt"] for _, row in generated_prompts.rows_of(source, size, seed, flag)]


def test_a_problem_is_a_function_of_seed_name_and_number():
    three = questions()
    assert len(three) == 6
    assert questions(size=5)[:3] == three[:3]
    assert questions("reasoning-gym:leg_counting") == three[3:]
    assert questions(seed=1) != three
    assert questions(flag="--eval-prompt-data") != three


def test_problems_become_prompts_that_name_their_rule_whatever_the_keys_of_files():
    config = DataConfig(reasoning_gym_size=3, input_key="question", label_key="answer")
    prompts = load_prompts(NAMES, config, make_tokenizer(), 9999)
    assert [prompt.text for prompt in prompts] == questions()
    assert {prompt.rule for prompt in prompts} == {"reasoning_gym"}
    assert json.loads(prompts[0].label)["name"] == "chain_sum"


ANOTHER_PROCESS = """
import sys
from onpolicy.rollout.generated_prompts import rows_of
print([row for _, row in rows_of(sys.argv[1], 3, 0, "--prompt-data")])
"""


@pytest.mark.parametrize(("name", "is_same"), [(NAMES, True), ("reasoning-gym:ransom_note", False)])
def test_another_process_makes_the_same(name, is_same):
    """Or, by its hashes, others: those are refused."""
    command = [sys.executable, "-c", ANOTHER_PROCESS, name]
    made = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("1", "2")
    ]
    assert (made[0].stdout == made[1].stdout) is is_same
    assert made[0].stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no dataset 'nothing'. Known: ab, "),
        ("arc_agi", "compares what JSON does not hold"),
        ("ransom_note", "are others in every process.* Set PYTHONHASHSEED=0"),
    ],
)
def test_datasets_that_cannot_be_used_are_refused(name, message, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=message):
        questions(f"reasoning-gym:chain_sum,{name}")
