"""Every YAML file of the examples is a configuration that a run would accept."""

from pathlib import Path

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.name}")
def test_it_is_valid(file):
    argv = ["--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl"]
    argv += ["--eval-prompt-data", "/e.jsonl"] if "eval_interval" in file.read_text() else []
    argv += ["--save", "/s"] if "save_interval" in file.read_text() else []
    argv += [] if "rm_type" in file.read_text() else ["--rm-type", "exact"]
    argv += ["--teacher-checkpoint", "/t"] if "opd_" in file.read_text() else []
    of_agents = ("rollout_max_context_len", "tool_call_parser", "episode_time_limit")
    if any(key in file.read_text() for key in of_agents):
        argv += ["--custom-agent-function-path", "module.function"]
    config = parse(TrainConfig, [*argv, "--custom-config-path", str(file)], "onpolicy train")
    validate(config)


def test_the_keys_of_miles_keep_their_names():
    mis = parse(TrainConfig, ["--custom-config-path", str(_example("mis.yaml"))], "x").fallback
    keys = [
        "use_tis", "use_rs", "tis_level", "rs_level", "tis_mode", "tis_lower_bound",
        "tis_upper_bound", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold",
        "tis_batch_normalize",
    ]  # fmt: skip
    text = _example("mis.yaml").read_text()
    assert all(hasattr(mis, key) and f"{key}:" in text for key in keys)
    assert (mis.use_tis, mis.rs_veto_threshold, mis.rs_lower_bound) == (True, 1e-4, None)


def _example(name):
    return next(file for file in FILES if file.name == name)
