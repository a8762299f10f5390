"""A run whose agent knows the clients of OpenAI and Anthropic alone, on a real server."""

import json

import pytest

from onpolicy.outputs.metrics import read_jsonl
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import start_train, write_prompts

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gateway")
    checkpoint = make_checkpoint(directory / "model")
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    data = write_prompts(directory / "prompts.jsonl")
    flags = ("--custom-agent-function-path", "gateway_agent.chats", "--num-rollout", "2")
    parser = ("--tool-call-parser", "pythonic")
    process = start_train(checkpoint, data, directory, *flags, *parser)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    return directory / "run"


def test_not_one_token_of_any_turn_is_another_in_training(run):
    metrics = list(read_jsonl(run / "metrics.jsonl"))
    assert [step["parity/num_mismatched_tokens"] for step in metrics] == [0, 0]
    assert all(step["parity/num_compared_tokens"] > 4 * 4 * 12 for step in metrics)


def test_a_chat_is_one_trajectory_of_three_answers_beside_the_message_of_the_other_client(run):
    rows = [
        json.loads(line)
        for file in sorted((run / "samples").iterdir())
        for line in file.read_text().splitlines()
    ]
    assert len(rows) >= 2 * 16
