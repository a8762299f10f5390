"""Whole runs as a user starts them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from train_runs import ROLLOUTS

HERE = Path(__file__).parent
PATHS = [str(HERE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": "abcdefgh"[i:] * 3, "label": "x"} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def start(checkpoint, data):
    """Starts `onpolicy train` in a process; `preamble` is code that runs before it."""

    def start_run(directory, *argv, preamble="", launcher=(), mode=("--true-on-policy-mode",)):
        code = (
            f"{preamble}\nimport sys\nfrom onpolicy.cli import main\nsys.exit(main(sys.argv[1:]))"
        )
        script = directory / "run.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text("if __name__ == '__main__':\n" + re.sub("^", "    ", code, flags=re.M))
        return subprocess.Popen(
            [
                sys.executable, *launcher, str(script), "train",
                "--hf-checkpoint", str(checkpoint), "--prompt-data", str(data),
                "--custom-rm-path", "own_reward.score", *mode,
                "--num-rollout", str(ROLLOUTS), "--rollout-batch-size", "4",
                "--n-samples-per-prompt", "4", "--rollout-max-response-len", "24",
                "--global-batch-size", "8", "--lr", "1e-3", "--max-tokens-per-gpu", "300",
                "--run-dir", str(directory / "run"), *argv,
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    return start_run
