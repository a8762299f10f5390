"""What tests ask of a run that they started."""

from __future__ import annotations

import re
import time

from onpolicy.outputs.metrics import read_jsonl

ROLLOUTS = 4


def finish(process, code=0):
    output, _ = process.communicate(timeout=400)
    assert process.returncode == code, output[-4000:]
    return output


def run_hash(output):
    return re.search(r"run hash\s+│\s+(\w{32})", output).group(1)


def summary(output):
    """The rows of the table at the end."""
    return dict(re.findall(r"│ ([\w, ]+?)\s+│ (.*?)\s+│", output.split("onpolicy run")[-1]))


def exported_weights(save, done=ROLLOUTS):
    return (save / f"step_{done:06d}" / "hf" / "model-00000.safetensors").read_bytes()


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def metrics_of(directory):
    file = directory / "run" / "metrics.jsonl"
    return [r for r in read_jsonl(file) if "rollout/raw_reward" in r] if file.exists() else []
