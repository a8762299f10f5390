"""The example launchers, called from another directory, as far as this machine can run them."""

import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.support.forked_commands import forked_commands
from tests.support.forked_processes import forked_processes
from tests.support.own_pythons import python_of
from tests.support.tiny import make_checkpoint

pytestmark = pytest.mark.runs

EXAMPLES = Path(__file__).parents[2] / "examples"
ANEW = {"mismatch_correction/run_megatron.sh"}
"""With the command of its own .venv, as a user starts it."""


@pytest.fixture(scope="module")
def commands():
    """Where `onpolicy` is whose processes need not import everything anew."""
    with forked_processes(), TemporaryDirectory() as directory, forked_commands(Path(directory)):
        yield directory


@pytest.fixture
def launch(tmp_path, commands):
    def run(script, *argv, **variables):
        path = f"{commands}:{os.environ['PATH']}"
        if script not in ANEW:  # a function comes before the .venv that a script puts first
            variables["BASH_FUNC_onpolicy%%"] = f'() {{ "{commands}/onpolicy" "$@"; }}'
        return subprocess.run(
            [str(EXAMPLES / script), *argv],
            env={**os.environ, "PATH": path, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture
def inputs(tmp_path):
    """Makes a checkpoint and a rollout's prompts, where the launchers of either kind look for them."""

    def make(architecture="qwen3", chats=False):
        template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        made = tmp_path / "inputs"
        checkpoint = make_checkpoint(made / "model", architecture, max_position_embeddings=16384)
        (checkpoint / "chat_template.jinja").write_text(template)
        for name in ("data", "eval"):
            write_problems(made / f"{name}.jsonl", chats)
        return {
            "HF_CHECKPOINT": str(checkpoint), "PROMPT_DATA": str(made / "data.jsonl"),
            "NUM_TRAINERS": "2", "WORK_DIR": str(tmp_path),
            "SEARCH_URL": "http://127.0.0.1:1/retrieve",
        }  # fmt: skip

    return make


def write_problems(file, chats=False):
    texts = [f"x+{n}=?" for n in range(64)]
    prompts = [[{"role": "user", "content": text}] if chats else text for text in texts]
    file.write_text("".join(json.dumps({"prompt": p, "label": "7"}) + "\n" for p in prompts))


ON_A_CPU = ("--operators", "auto", "--no-colocate")
ENGINES = '"rollout_num_engines": 8'
STEPS = "1024 samples = global_batch_size 512 x 2 optimizer steps"
LAUNCHERS = [
    ("dapo_math_8gpu/run.sh", [*ON_A_CPU, "--num-rollout", "3"], [STEPS, ENGINES, '"num_rollout": 3']),
    ("true_on_policy/run_qwen3_4b_ppo.sh", [*ON_A_CPU, "--lambd", "0.95"],
     ['"num_critic_only_steps": 20', '"lambd": 0.95']),
    ("calculator_agent/run.sh", [], ['calculator_agent/environment.py:Calculator"']),
    ("mid_episode_rewards/run.sh", ["gae"],
     ['"advantage_estimator": "gae"', '"environment_rewards": "turn"']),
    ("agents_8gpu/run.sh", ["search", *ON_A_CPU], ["agents_8gpu/search.py:Search", ENGINES]),
    ("agents_8gpu/run.sh", ["code", *ON_A_CPU], ["agents_8gpu/code.py:Code", ENGINES]),
    ("openai_agent/run.sh", [], ['"custom_agent_function_path"']),
    ("mini_swe_agent/run.sh", [], []),
    ("verifiers/run.sh", [], ["6 prompts"]),
    ("agent_programs/run.sh", ["langgraph"], ['"agent_programs": 4']),
    ("mismatch_correction/run_megatron.sh", ["--num-rollout", "3"],
     ['"use_rs": true', '"megatron_tp": 2']),
]  # fmt: skip
"""(script, arguments, what it says); those for GPUs are in tests/test_gpu_rehearsal.py."""

NEEDS = {"mini_swe": "minisweagent", "mismatch": "megatron.core"}


@pytest.mark.parametrize(("script", "argv", "says"), LAUNCHERS, ids=lambda x: str(x)[:24])
def test_a_launcher_is_a_valid_run(launch, inputs, script, argv, says):
    for name, package in NEEDS.items():
        if script.startswith(name):
            pytest.importorskip(package)
    if script.startswith(("verifiers", "agent_programs")):
        python_of((argv or ["verifiers"])[0])
    done = launch(script, *argv, "--dry-run", **inputs(chats=script.startswith("agents_8gpu")))
    assert done.returncode == 0, done.stderr
    assert [text for text in says if text not in done.stdout] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_a_launcher_says_so_once(launch, inputs):
    """The others for GPUs are in tests/test_gpu_rehearsal.py."""
    done = launch("true_on_policy/run_qwen3_30b_a3b.sh", **inputs("qwen3-moe"))
    assert done.returncode == 2
    assert done.stderr.count("ConfigError: --operators=hopper: this machine has no GPU") == 1
    assert "Traceback" not in done.stderr


def test_a_launcher_says_what_it_was_not_given(launch):
    done = launch("true_on_policy/run_qwen3_4b.sh", HF_CHECKPOINT="")
    assert done.returncode != 0
    assert "HF_CHECKPOINT: must name a local Hugging Face checkpoint" in done.stderr
