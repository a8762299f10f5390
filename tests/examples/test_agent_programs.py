"""Agents of four frameworks of today train as they are, each in a Python of its own.

Tests install nothing: they take the Pythons that run.sh puts into the cache, and are skipped by name
where there is none.
"""

import json
import sys
from pathlib import Path

import pytest

from onpolicy.outputs.metrics import read_jsonl
from tests.support.forked_processes import forked_processes
from tests.support.own_pythons import AGENTS as AGENT_PYTHONS
from tests.support.own_pythons import has_python, python_of
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import finish, start_train

EXAMPLE = Path(__file__).parents[2] / "examples/agent_programs"
AGENTS = sorted(file.parent.name for file in EXAMPLE.glob("*/agent.py"))

TEMPLATE = (
    "{% for m in messages if m.role != 'system' %}{{ m.role[0] }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
STARTS = """
import json, os
name = json.loads(os.environ["ONPOLICY_ROW"])["metadata"]["agent"]
python = f"{os.environ['CACHE']}/{name}/bin/python"
os.execv(python, [python, f"{os.environ['EXAMPLE']}/{name}/agent.py"])
"""


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.runs
def test_each_framework_trains_unmodified_and_every_token_is_the_engines(tmp_path):
    known = [name for name in AGENTS if has_python(name)] or [python_of(AGENTS[0])]
    made = make_checkpoint(tmp_path / "model", max_position_embeddings=4096)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    rows = [
        {"prompt": f"{n}*3=", "label": str(3 * n), "agent": name} for n, name in enumerate(known)
    ]
    data, starts = tmp_path / "data.jsonl", tmp_path / "starts.py"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    starts.write_text(STARTS)
    count = str(len(known))
    argv = ["--agent-command", f"{sys.executable} -S {starts}", "--tool-call-parser", "pythonic"]
    argv += ["--agent-programs", "2", "--agent-workers", "1", "--num-rollout", "1"]
    argv += ["--rollout-batch-size", count, "--n-samples-per-prompt", "2"]
    argv += ["--global-batch-size", str(2 * len(known)), "--rollout-max-response-len", "600"]
    argv += ["--custom-rm-path", "", "--max-tokens-per-gpu", "4096"]
    own = {"CACHE": str(AGENT_PYTHONS), "EXAMPLE": str(EXAMPLE)}
    with forked_processes():
        finish(start_train(made, data, tmp_path, *argv, env=own))
    (step,) = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert step["parity/num_mismatched_tokens"] == 0 < step["parity/num_compared_tokens"]
    assert step["rollout/num_failed_episodes"] == 0
    assert step["episodes/num_rewarded"] == 2 * len(known)
