"""Training from Python: the notebook, as a kernel runs it, and what `train` refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import onpolicy
from onpolicy import Sample, TrainConfig, api, train
from onpolicy.api import with_rewards
from onpolicy.cli.parse import config_of
from onpolicy.config.flags import flag_values
from onpolicy.config.groups import DataConfig, ModelConfig
from onpolicy.config.groups.reward_flags import name_of
from onpolicy.errors import ConfigError
from onpolicy.system.user_functions import load_function

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "python" / "train.ipynb"

AS_A_KERNEL = """
import asyncio, json, sys
import matplotlib
matplotlib.use("Agg")
import __main__

async def cells(file):
    for cell in json.load(open(file))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), vars(__main__))

asyncio.run(cells(sys.argv[1]))
"""
"""Cells are run one after the other inside an event loop, and their functions have no file."""


@pytest.mark.engine
def test_the_notebook_trains_inside_an_event_loop_with_a_reward_that_has_no_file(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(NOTEBOOK.parents[1] / 'quickstart')!r})\n"
    made = "import prepare; from pathlib import Path; prepare.STEPS = 2\n"
    made += f"prepare.main(Path({str(tmp_path / 'inputs')!r}))"
    subprocess.run([sys.executable, "-c", code + made], check=True, timeout=200)
    done = subprocess.run(
        [sys.executable, "-c", AS_A_KERNEL, NOTEBOOK],
        env={**os.environ, "WORK_DIR": str(tmp_path), "NUM_ROLLOUT": "2"},
        cwd=NOTEBOOK.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "0 of " in done.stdout and "tokens mismatched\nrun hash" in done.stdout
    records = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 2 and min(each["rollout/raw_reward"] for each in records) < 0


def test_public_names_come_when_they_are_used_and_no_other_is_there():
    assert {onpolicy.train, onpolicy.Sample, onpolicy.TrainConfig} == {train, Sample, TrainConfig}
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        onpolicy.trian  # noqa: B018


def test_flags_are_checked_as_those_of_a_file():
    paths = {"hf_checkpoint": "/m", "prompt_data": "/d.jsonl"}
    for flags, message in (
        ({**paths, "num_rollouts": 3}, r"onpolicy.train: .*num_rollouts.*num_rollout"),
        ({**paths, "num_rollout": [3]}, r"onpolicy.train: num_rollout=\[3\]"),
        ({**paths, "rm_type": "math"}, r"rewards=.*: the configuration has math already"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(flags, rewards=["exact"])


def of_a_notebook(source):
    """The functions of a cell, which have no module that a worker process could import."""
    names = {"__name__": "__main__"}
    exec(source, names)
    return [each for name, each in names.items() if name.startswith("reward_for")]


CELL = "LIMIT = 3\ndef reward_for_brevity(sample): return float(len(sample.response) < LIMIT)\n"


def test_functions_of_a_notebook_keep_their_names_and_a_resumed_run_finds_the_same(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(api, "CACHE", tmp_path / "rewards")
    cell = f"{CELL}def reward_for_words(sample): return 1.0\n"
    flags = {"hf_checkpoint": "/m", "prompt_data": "/d.jsonl"}
    config = config_of(TrainConfig, flags, "onpolicy.train")
    first, again, other = (
        with_rewards(config, [*of_a_notebook(each), "math"]).reward
        for each in (cell, cell, cell.replace("LIMIT = 3", "LIMIT = 4"))
    )
    assert [name_of(source) for source in first.sources] == [
        "reward_for_brevity", "reward_for_words", "math",
    ]  # fmt: skip
    assert first == again != other
    path = with_rewards(config, of_a_notebook(CELL)).reward.custom_rm_path
    assert load_function(path, "--custom-rm-path")(SimpleNamespace(response="ab")) == 1.0


def test_a_configuration_that_is_given_whole_is_validated_before_anything_starts(tmp_path):
    config = TrainConfig(
        model=ModelConfig(hf_checkpoint=str(tmp_path / "none")),
        data=DataConfig(prompt_data=(str(tmp_path / "none.jsonl"),)),
    )
    assert flag_values(config)["hf_checkpoint"].endswith("none")
    with pytest.raises(ConfigError, match="none"):
        train(config, rewards=[len])
