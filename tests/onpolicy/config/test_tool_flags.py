"""The flags that several commands have: each stands once, or is named here as a command's own."""

import dataclasses

import pytest

from onpolicy.config import TrainConfig
from onpolicy.config.flags import flag_defaults, flag_types
from onpolicy.config.tool_flags import BenchConfig, ServeConfig, VerifyConfig

OWN = {
    "seed": "what it decides depends on the command",
    "run_dir": "one for each command",
    "true_on_policy_mode": "off in a run unless it is asked for, on where it is what is looked at",
    "train_backend": "bench takes two at once",
    "n_samples_per_prompt": "few, where nothing is learned",
    "weight_sync": "without the size of its buffer, which verify chooses",
}


def own_flags(config_class):
    """Flags that a command declares itself, not through a group."""
    is_group = dataclasses.is_dataclass
    return {
        item.name
        for item in dataclasses.fields(config_class)
        if not (callable(item.default_factory) and is_group(item.default_factory))
    }


@pytest.mark.parametrize("config_class", [VerifyConfig, BenchConfig, ServeConfig])
def test_a_flag_that_train_has_too_comes_from_a_shared_group(config_class):
    copied = own_flags(config_class) & flag_types(TrainConfig).keys() - {"sglang_args"}
    assert copied <= OWN.keys()


@pytest.mark.parametrize("config_class", [VerifyConfig, BenchConfig, ServeConfig])
def test_a_shared_flag_has_the_same_type_and_default_everywhere(config_class):
    shared = flag_types(config_class).keys() & flag_types(TrainConfig).keys() - OWN.keys()
    assert {"hf_checkpoint", "dtype", "operators", "row_parallel_blocks", "cpu_threads"} <= shared
    for name in shared:
        assert flag_types(config_class)[name] == flag_types(TrainConfig)[name]
        assert flag_defaults(config_class)[name] == flag_defaults(TrainConfig)[name]


@pytest.mark.parametrize("config_class", [VerifyConfig, ServeConfig])
def test_verify_and_serve_are_aligned_unless_they_are_told(config_class):
    assert flag_defaults(config_class)["true_on_policy_mode"] is True
    assert flag_defaults(TrainConfig)["true_on_policy_mode"] is False
