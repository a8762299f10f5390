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
from tests.support.tiny import make_checkpoint

pytestmark = pytest.mark.runs

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def commands():
    """Where `onpolicy` is whose processes need not import everything anew."""
    with forked_processes(), TemporaryDirectory() as directory, forked_commands(Path(directory)):
        yield directory


@pytest.fixture
def launch(tmp_path, commands):
    def run(script, *argv, **variables):
        path = f"{commands}:{os.environ['PATH']}"
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
    """Makes a checkpoint and a rollout's prompts, and returns the launchers' variables."""

    def make(architecture="qwen3", chats=False):
        template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        checkpoint = make_checkpoint(
            tmp_path / "model", architecture, max_position_embeddings=16384
        )
        (checkpoint / "chat_template.jinja").write_text(template)
        write_problems(tmp_path / "data.jsonl", chats)
        data = tmp_path / "data.jsonl"
        return {"HF_CHECKPOINT": str(checkpoint), "PROMPT_DATA": str(data), "NUM_TRAINERS": "2"}

    return make


def write_problems(file, chats=False):
    texts = [f"x+{n}=?" for n in range(64)]
    prompts = [[{"role": "user", "content": text}] if chats else text for text in texts]
    file.write_text("".join(json.dumps({"prompt": p, "label": "7"}) + "\n" for p in prompts))


@pytest.mark.parametrize("chats", [False, True])
def test_the_8_gpu_launcher_is_a_valid_run(launch, inputs, chats):
    given = inputs(chats=chats)
    done = launch("dapo_math_8gpu/run.sh", "--dry-run", "--num-rollout", "3", **given)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1024 samples = global_batch_size 512 x 2 optimizer steps") == 1
    assert '"num_rollout": 3' in done.stdout
    assert '"rollout_num_engines": 4' in done.stdout


@pytest.mark.parametrize(
    ("script", "servers"), [("run_qwen3_4b.sh", 4), ("run_qwen3_30b_a3b.sh", 2)]
)
def test_the_true_on_policy_launchers_are_valid_runs(launch, inputs, script, servers):
    done = launch(f"true_on_policy/{script}", "--dry-run", "--operators", "auto", **inputs())
    assert done.returncode == 0, done.stderr
    assert "1024 samples = global_batch_size 1024 x 1 optimizer steps" in done.stdout
    assert f'"rollout_num_engines": {servers}' in done.stdout
    assert '"true_on_policy_mode": true' in done.stdout


def test_the_launcher_with_a_critic_is_a_valid_run(launch, inputs):
    flags = ("--dry-run", "--operators", "auto", "--lambd", "0.95")
    done = launch("true_on_policy/run_qwen3_4b_ppo.sh", *flags, **inputs())
    assert done.returncode == 0, done.stderr
    assert '"num_critic_only_steps": 20' in done.stdout and '"lambd": 0.95' in done.stdout


def test_the_launcher_with_adapters_is_a_valid_run(launch, inputs):
    flags = ("--dry-run", "--operators", "auto", "--lora-rank", "4")
    done = launch("true_on_policy/run_qwen3_32b_lora.sh", *flags, **inputs())
    assert done.returncode == 0, done.stderr
    assert '"lora_rank": 4' in done.stdout and '"--tp-size",' in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize(
    "script", ["run_qwen3_4b.sh", "run_qwen3_30b_a3b.sh", "run_qwen3_30b_a3b_megatron.sh"]
)
def test_without_a_gpu_a_launcher_says_so_once(launch, inputs, script):
    given = inputs("qwen3-moe")
    argv = ["--megatron-ep", "1", "--megatron-pp", "2"] if "megatron" in script else []
    done = launch(f"true_on_policy/{script}", *argv, **given)
    assert done.returncode == 2
    assert done.stderr.count("ConfigError: --operators=hopper: this machine has no GPU") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", ["dapo_math_8gpu/run.sh", "true_on_policy/run_qwen3_4b.sh"])
def test_a_launcher_says_what_it_was_not_given(launch, script):
    done = launch(script, HF_CHECKPOINT="")
    assert done.returncode != 0
    assert "HF_CHECKPOINT: must name a local Hugging Face checkpoint" in done.stderr


def test_the_megatron_launcher_is_a_valid_run(launch, inputs):
    pytest.importorskip("megatron.core")
    given = inputs("qwen3-moe")
    script = "true_on_policy/run_qwen3_30b_a3b_megatron.sh"
    argv = ["--dry-run", "--operators", "auto", "--megatron-pp", "2", "--megatron-ep"]
    done = launch(script, *argv, "1", **given)
    assert done.returncode == 0, done.stderr
    assert '"train_backend": "megatron"' in done.stdout
    done = launch(script, *argv, "4", **given)
    assert done.returncode != 0
    assert "--megatron-ep=4: does not divide num_experts=6" in done.stderr


def test_the_megatron_launcher_of_the_corrections_is_a_valid_run(launch, tmp_path):
    """With the commands of its own .venv, started anew."""
    pytest.importorskip("megatron.core")
    inputs = tmp_path / "inputs"
    make_checkpoint(inputs / "model")
    for name in ("data", "eval"):
        write_problems(inputs / f"{name}.jsonl")
    done = launch(
        "mismatch_correction/run_megatron.sh", "--dry-run", "--num-rollout", "3",
        WORK_DIR=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"use_rs": true' in done.stdout and '"megatron_tp": 2' in done.stdout


def test_the_calculator_agent_is_a_valid_run(launch, inputs, tmp_path):
    inputs()
    (tmp_path / "inputs").mkdir()
    for name in ("model", "data.jsonl"):
        (tmp_path / name).rename(tmp_path / "inputs" / name)
    done = launch("calculator_agent/run.sh", "--dry-run", WORK_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert 'calculator_agent/environment.py:Calculator"' in done.stdout


def test_the_market_is_a_valid_run(launch, inputs, tmp_path):
    inputs()
    (tmp_path / "inputs").mkdir()
    for name in ("model", "data.jsonl"):
        (tmp_path / name).rename(tmp_path / "inputs" / name)
    done = launch("mid_episode_rewards/run.sh", "gae", "--dry-run", WORK_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert '"advantage_estimator": "gae"' in done.stdout
    assert '"environment_rewards": "turn"' in done.stdout


@pytest.mark.parametrize("agent", ["search", "code"])
def test_the_agents_on_8_gpus_are_valid_runs(launch, inputs, agent):
    given = {**inputs(chats=True), "SEARCH_URL": "http://127.0.0.1:1/retrieve"}
    done = launch("agents_8gpu/run.sh", agent, "--dry-run", "--operators", "auto", **given)
    assert done.returncode == 0, done.stderr
    assert f"agents_8gpu/{agent}.py:{agent.title()}" in done.stdout
    assert '"rollout_num_engines": 4' in done.stdout


def test_the_agent_of_mini_swe_agent_is_a_valid_run(launch, inputs, tmp_path):
    pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")
    inputs()
    (tmp_path / "inputs").mkdir()
    for name in ("model", "data.jsonl"):
        (tmp_path / name).rename(tmp_path / "inputs" / name)
    done = launch("mini_swe_agent/run.sh", "--dry-run", WORK_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_the_environment_of_verifiers_is_a_valid_run(launch, inputs, tmp_path):
    pytest.importorskip("verifiers", reason="verifiers is not installed")
    inputs()
    (tmp_path / "inputs").mkdir()
    (tmp_path / "model").rename(tmp_path / "inputs/model")
    done = launch("verifiers/run.sh", "--dry-run", WORK_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "6 prompts" in done.stdout
