"""Every YAML file of the examples is a configuration that a run would accept."""

from pathlib import Path

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.errors import ConfigError

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.name}")
def test_it_is_valid(file):
    argv = ["--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl"]
    argv += ["--eval-prompt-data", "/e.jsonl"] if "eval_interval" in file.read_text() else []
    argv += ["--save", "/s"] if "save_interval" in file.read_text() else []
    argv += ["--rollout-lag", "1"] if "correct_lag" in file.read_text() else []
    argv += [] if "rm_type" in file.read_text() else ["--rm-type", "exact"]
    argv += ["--teacher-checkpoint", "/t"] if "opd_" in file.read_text() else []
    of_agents = ("rollout_max_context_len", "tool_call_parser", "episode_time_limit")
    if "agent_programs" in file.read_text():
        argv += ["--agent-command", "python"]
    elif any(key in file.read_text() for key in of_agents):
        argv += ["--custom-agent-function-path", "module.function"]
    config = parse(TrainConfig, [*argv, "--custom-config-path", str(file)], "onpolicy train")
    validate(config)


FOR_8_GPUS = ("agents_8gpu", "dapo_math_8gpu", "true_on_policy")


@pytest.mark.parametrize("example", FOR_8_GPUS)
def test_both_sides_share_8_gpus_and_weights_go_by_a_way_for_one_gpu(example):
    """Groups of NCCL's fail there, at the first push (OpenRLHF issue 726, AReaL issue 481).

    Real servers get this push in tests/e2e/test_push_faults.py.
    """
    argv = ["--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl", "--save", "/s"]
    argv += ["--custom-agent-function-path", "module.function"] * (example == "agents_8gpu")
    argv += ["--custom-config-path", str(ROOT / "examples" / example / "config.yaml")]
    config = parse(TrainConfig, argv, "onpolicy train")
    validate(config)
    assert config.engine.colocate and config.sync.weight_sync == "tensor"
    with pytest.raises(ConfigError, match=r"with --colocate .* NCCL"):
        validate(parse(TrainConfig, [*argv, "--weight-sync", "distributed"], "onpolicy train"))


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
