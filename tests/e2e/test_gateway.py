"""A run whose agent knows the clients of OpenAI and Anthropic alone, on a real server."""

import json

from onpolicy.outputs.metrics import read_jsonl
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import start_train, write_prompts

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def test_not_one_token_of_any_turn_is_another_in_training(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model")
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    data = write_prompts(tmp_path / "prompts.jsonl")
    flags = ("--custom-agent-function-path", "gateway_agent.chats", "--num-rollout", "2")
    parser = ("--tool-call-parser", "pythonic")
    process = start_train(checkpoint, data, tmp_path, *flags, *parser)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    metrics = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert [step["parity/num_mismatched_tokens"] for step in metrics] == [0, 0]
    samples = [
        json.loads(line)
        for file in (tmp_path / "run" / "samples").iterdir()
        for line in file.read_text().splitlines()
    ]
    assert len(samples) >= 2 * 16
