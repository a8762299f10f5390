"""Whole runs as a user starts them, and what tests ask of them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from onpolicy.outputs.metrics import read_jsonl
from tests.support.after_import import after_import
from tests.support.processes import is_gone, is_guard, trainer_ranks

ROLLOUTS = 4
ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT / "tests/e2e"), str(ROOT)]
"""Where a run finds its reward function, and its script what it imports."""

ALIGNED = ("--true-on-policy-mode",)
TWO_RANKS = ("--actor-num-ranks-per-node", "2")

FREE = (
    "--rollout-schedule", "free", "--rollout-max-response-len", "120", "--max-staleness", "3",
    "--over-sampling-batch-size", "1",
)  # fmt: skip
"""Four responses at a time, so that some are being drawn at every push."""

IN_RANKS = "any('default_worker' in argument for argument in sys.orig_argv)"
"""Of Python's processes in a run those that Ray started."""


def write_prompts(file):
    rows = [{"prompt": "abcdefgh"[i:] * 3, "label": "x"} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def start_train(
    checkpoint, data, directory, *argv, preamble="", in_ranks="", mode=ALIGNED, env=None
):
    """Starts `onpolicy train` in a process; `preamble` is code that runs before it, and `in_ranks`
    what runs in each rank of the trainer."""
    code = (
        "from tests.support.processes import end_with_parent\nend_with_parent()\n"
        f"{preamble}\nimport sys\nfrom onpolicy.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    script = directory / "run.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text("if __name__ == '__main__':\n" + re.sub("^", "    ", code, flags=re.M))
    code = after_import("onpolicy.training.policy_trainer", in_ranks, IN_RANKS) if in_ranks else ""
    (directory / "sitecustomize.py").write_text(code)
    return subprocess.Popen(
        [
            sys.executable, str(script), "train",
            "--hf-checkpoint", str(checkpoint), "--prompt-data", str(data),
            "--custom-rm-path", "own_reward.score", *mode,
            "--num-rollout", str(ROLLOUTS), "--rollout-batch-size", "4",
            "--n-samples-per-prompt", "4", "--rollout-max-response-len", "24",
            "--global-batch-size", "8", "--lr", "1e-3", "--max-tokens-per-gpu", "300",
            "--rm-workers", "1", "--run-dir", str(directory / "run"), *argv,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *PATHS]), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def a_rank_is_lost(start, directory, *argv, under_way=lambda process: None):
    """A run of which a rank is killed when two rollouts are saved, and which may start it again.

    under_way: called with the process once its first rollout is saved.
    """
    save = directory / "save"
    saves = ("--save", str(save), "--save-interval", "1")
    process = start(directory, *argv, *saves, "--max-rank-restarts", "1")
    for done, act in ((1, under_way), (2, lambda process: trainer_ranks(process.pid)[-1].kill())):
        saved = (save / f"step_{done:06d}" / "state.json").is_file
        wait_for(lambda saved=saved: saved() or process.poll() is not None)
        act(process)
    return process


def kill_an_engine(process):
    """Kill the guard of the last of a run's engines, and so the engine."""
    servers = [child for child in psutil.Process(process.pid).children() if is_guard(child)]
    servers[-1].kill()


KILLED_WHILE_SAVING = """
import os, signal
from onpolicy.cluster import ray_environment as environment
environment.prepare(local=True)  # before Ray is imported
from onpolicy.cluster.trainer_ranks import TrainerRanks
export = TrainerRanks.export
def export_or_die(self, directory):
    if "000004" in str(directory):
        os.kill(os.getpid(), signal.SIGKILL)
    export(self, directory)
TrainerRanks.export = export_or_die
"""


def killed_while_saving(start, directory, save, *argv):
    """A run that is killed in the middle of its last checkpoint, of two; no child outlives it."""
    process = start(directory, *argv, preamble=KILLED_WHILE_SAVING)
    seen = set()

    def gone():
        if process.poll() is None:
            seen.update(psutil.Process(process.pid).children(recursive=True))
        return process.poll() is not None

    wait_for(gone, 200)
    assert process.returncode == -signal.SIGKILL, process.stdout.read()[-4000:]
    assert sorted(p.name for p in save.iterdir()) == [
        ".lock", ".partial_step_000004", "step_000002",
    ]  # fmt: skip
    wait_for(lambda: all(map(is_gone, seen)), 60)
    assert len(seen) >= 3  # the server and its children


def finish(process, code=0):
    output, _ = process.communicate(timeout=400)
    assert process.returncode == code, output[-4000:]
    return output


def onpolicy(*argv, code=0, **options):
    """A command from its beginning to its end, which has that code."""
    command = [sys.executable, "-m", "onpolicy.cli", *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, **options)
    assert done.returncode == code, done.stderr[-3000:]
    return done


def run_hash(output):
    return re.search(r"run hash\s+│\s+(\w{32})", output).group(1)


def summary(output):
    return dict(re.findall(r"│ ([\w, ]+?)\s+│ (.*?)\s+│", output.split("onpolicy run")[-1]))


def exported_weights(save, done=ROLLOUTS):
    return (save / f"step_{done:06d}" / "hf" / "model-00000.safetensors").read_bytes()


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def metrics_of(directory):
    file = directory / "run" / "metrics.jsonl"
    return [r for r in read_jsonl(file) if "rollout/raw_reward" in r] if file.exists() else []


def journal_of(directory):
    return directory / "run" / "rollouts.jsonl"


def steps_of(file):
    return [line for line in map(json.loads, file.read_text().splitlines()) if "groups" in line]
