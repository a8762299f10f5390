"""The example launchers, called from another directory, as far as this machine can run them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import make_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def launch(tmp_path):
    def run(script, *argv, **variables):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            [str(EXAMPLES / script), *argv],
            env={**os.environ, "PATH": path, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.mark.parametrize("prompt", ["x+y=?", [{"role": "user", "content": "x+y=?"}]])
def test_the_8_gpu_launcher_is_a_valid_run(launch, tmp_path, prompt):
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    checkpoint = make_checkpoint(tmp_path / "model", max_position_embeddings=16384)
    (checkpoint / "chat_template.jinja").write_text(template)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": prompt, "label": "7"}) + "\n")
    done = launch(
        "dapo_math_8gpu/run.sh", "--dry-run", "--num-rollout", "3",
        HF_CHECKPOINT=str(checkpoint), PROMPT_DATA=str(data), NUM_TRAINERS="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1024 samples = global_batch_size 512 x 2 optimizer steps") == 1
    assert '"num_rollout": 3' in done.stdout
    assert '"rollout_num_engines": 4' in done.stdout


@pytest.mark.parametrize(
    ("script", "servers"), [("run_qwen3_4b.sh", 4), ("run_qwen3_30b_a3b.sh", 2)]
)
def test_the_true_on_policy_launchers_are_valid_runs(launch, tmp_path, script, servers):
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    checkpoint = make_checkpoint(tmp_path / "model", max_position_embeddings=16384)
    (checkpoint / "chat_template.jinja").write_text(template)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "x+y=?", "label": "7"}) + "\n")
    done = launch(
        f"true_on_policy/{script}", "--dry-run", "--operators", "auto",
        HF_CHECKPOINT=str(checkpoint), PROMPT_DATA=str(data), NUM_TRAINERS="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1024 samples = global_batch_size 1024 x 1 optimizer steps" in done.stdout
    assert f'"rollout_num_engines": {servers}' in done.stdout
    assert '"true_on_policy_mode": true' in done.stdout


@pytest.mark.parametrize("script", ["dapo_math_8gpu/run.sh", "true_on_policy/run_qwen3_4b.sh"])
def test_a_launcher_says_what_it_was_not_given(launch, script):
    done = launch(script, HF_CHECKPOINT="")
    assert done.returncode != 0
    assert "HF_CHECKPOINT: must name a local Hugging Face checkpoint" in done.stderr


def test_the_megatron_launcher_is_a_valid_run(launch, tmp_path):
    pytest.importorskip("megatron.core")
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3-moe", max_position_embeddings=16384)
    (checkpoint / "chat_template.jinja").write_text(template)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "x+y=?", "label": "7"}) + "\n")
    script = "true_on_policy/run_qwen3_30b_a3b_megatron.sh"
    argv = ["--dry-run", "--operators", "auto", "--megatron-pp", "2", "--megatron-ep"]
    given = {"HF_CHECKPOINT": str(checkpoint), "PROMPT_DATA": str(data), "NUM_TRAINERS": "2"}
    done = launch(script, *argv, "1", **given)
    assert done.returncode == 0, done.stderr
    assert '"train_backend": "megatron"' in done.stdout
    done = launch(script, *argv, "4", **given)
    assert done.returncode != 0
    assert "--megatron-ep=4: does not divide num_experts=6" in done.stderr


def test_the_megatron_launcher_of_the_corrections_is_a_valid_run(launch, tmp_path):
    pytest.importorskip("megatron.core")
    inputs = tmp_path / "inputs"
    make_checkpoint(inputs / "model")
    for name in ("data", "eval"):
        (inputs / f"{name}.jsonl").write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    done = launch(
        "mismatch_correction/run_megatron.sh", "--dry-run", "--num-rollout", "3",
        WORK_DIR=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"use_rs": true' in done.stdout and '"megatron_tp": 2' in done.stdout
