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


def test_a_launcher_says_what_it_was_not_given(launch):
    done = launch("dapo_math_8gpu/run.sh", HF_CHECKPOINT="")
    assert done.returncode != 0
    assert "HF_CHECKPOINT: must name a local Hugging Face checkpoint" in done.stderr
