import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.config.flags import flag_defaults, flag_types, flag_values, flags_of
from onpolicy.config.tools import BenchConfig, ServeConfig, VerifyConfig
from onpolicy.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "examples"


def train(*argv):
    return parse(TrainConfig, argv, "onpolicy train")


@pytest.fixture
def overlay(tmp_path):
    def write(text):
        file = tmp_path / "config.yaml"
        file.write_text(text)
        return "--custom-config-path", str(file)

    return write


def test_flags_have_their_field_names_without_groups():
    config = train("--hf-checkpoint", "/m", "--eps-clip-high", "0.3", "--true-on-policy-mode")
    assert config.model.hf_checkpoint == "/m"
    assert config.eps_clip_high == 0.3
    assert config.parity.true_on_policy_mode


def test_yaml_sets_defaults_and_the_command_line_wins(overlay):
    file = overlay(
        "lr: 0.5\nrollout_batch_size: 6\nshuffle: false\nrollout_stop_token_ids: [3, 4]\n"
    )
    config = train(*file, "--rollout-batch-size", "9")
    assert (config.trainer.lr, config.rollout.rollout_batch_size) == (0.5, 9)
    assert config.data.shuffle is False
    assert config.rollout.rollout_stop_token_ids == (3, 4)


def test_every_default_can_be_written_in_yaml_and_changes_nothing(overlay):
    defaults = flag_defaults(TrainConfig)
    defaults.pop("custom_config_path")
    file = overlay(yaml.safe_dump(json.loads(json.dumps(defaults))))  # of plain lists and numbers
    assert flag_values(train(*file)) == {
        **flag_values(TrainConfig()),
        "custom_config_path": file[1],
    }


@pytest.mark.parametrize("name", flag_types(TrainConfig))
def test_a_value_of_another_kind_is_refused_in_yaml_for_every_flag(overlay, name):
    with pytest.raises(ConfigError, match=rf"config.yaml: {name}"):
        train(*overlay(f"{name}: {{a: 1}}"))


def test_an_unknown_yaml_key_names_the_nearest(overlay):
    with pytest.raises(
        ConfigError, match=r"config.yaml: unknown key 'rollout_batchsize'.*rollout_batch_size"
    ):
        train(*overlay("rollout_batchsize: 6\n"))


@pytest.mark.parametrize(
    ("text", "problem"), [("a: [", "not valid YAML"), ("- lr", "must be a mapping")]
)
def test_yaml_that_is_no_configuration_is_refused(overlay, text, problem):
    with pytest.raises(ConfigError, match=problem):
        train(*overlay(text))


def test_a_missing_yaml_file_is_refused():
    with pytest.raises(ConfigError, match=r"--custom-config-path=/nowhere.yaml: cannot be read"):
        train("--custom-config-path", "/nowhere.yaml")


def test_an_empty_yaml_file_changes_nothing(overlay):
    assert train(*overlay("")).trainer == TrainConfig().trainer


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rollout-batchsize", "3"], "--rollout-batchsize: .*Did you mean --rollout-batch-size"),
        (["--no-shufle"], "--no-shufle: unknown flag. Did you mean --no-shuffle"),
        (["--shuffle", "no"], "'no' after --shuffle: is no flag.*--no-name"),
        (["train"], "'train': is no flag"),
    ],
)
def test_an_argument_that_is_no_flag_is_refused_with_the_nearest_name(argv, message):
    with pytest.raises(ConfigError, match=message):
        train(*argv)


def test_sglang_flags_are_collected_in_order_with_their_values(overlay):
    config = train(
        *overlay("sglang_chunked_prefill_size: 48\nsglang_disable_radix_cache: true\n"),
        "--sglang-tp-size", "2", "--lr", "0.1", "--sglang-log-requests",
    )  # fmt: skip
    assert config.sglang_args == (
        "--chunked-prefill-size", "48", "--disable-radix-cache", "--tp-size", "2", "--log-requests",
    )  # fmt: skip
    assert config.trainer.lr == 0.1


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/*.yaml")), ids=lambda f: f.parent.name)
def test_every_example_configuration_loads(file):
    train("--custom-config-path", str(file))


def test_the_flags_are_the_ones_that_users_know():
    known = set(flag_types(TrainConfig))
    assert known >= {
        "hf_checkpoint", "prompt_data", "input_key", "label_key", "apply_chat_template",
        "rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_rollout",
        "rollout_max_response_len", "rollout_temperature", "rm_type", "custom_rm_path",
        "advantage_estimator", "eps_clip", "eps_clip_high", "lr", "train_backend",
        "true_on_policy_mode", "custom_config_path", "save", "save_interval", "load", "use_wandb",
        "use_tensorboard", "eval_interval", "eval_prompt_data", "parity_policy",
        "max_tokens_per_gpu", "rollout_num_engines", "rollout_server_url", "weight_sync",
    }  # fmt: skip


@pytest.mark.parametrize("config_class", [TrainConfig, VerifyConfig, BenchConfig, ServeConfig])
def test_no_flag_is_without_help(config_class):
    assert [flag.name for flag in flags_of(config_class) if not flag.help] == []


@pytest.mark.parametrize("command", ["train", "data", "verify", "bench", "serve"])
def test_help_needs_no_heavy_import(command):
    """What makes --help answer in under a second: nothing below is loaded for it."""
    code = (
        "import sys\n"
        "from onpolicy.cli.main import main\n"
        "try:\n"
        f"    main([{command!r}, '--help'])\n"
        "except SystemExit:\n"
        "    heavy = {'torch', 'transformers', 'sglang', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "    sys.exit(f'loaded: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"usage: onpolicy {command}" in done.stdout


@pytest.mark.parametrize("config_class", [VerifyConfig, ServeConfig])
def test_tools_take_their_flags(config_class):
    config = parse(config_class, ["--hf-checkpoint", "/m", "--no-true-on-policy-mode"], "x")
    assert config.model.hf_checkpoint == "/m" and not config.true_on_policy_mode


def test_bench_takes_what_to_measure_first():
    assert parse(BenchConfig, ["step", "--repetitions", "3"], "x").what == "step"


def test_verify_and_bench_take_the_training_engine():
    argv = ["--train-backend", "megatron", "--megatron-tp", "2"]
    config = parse(VerifyConfig, argv, "x")
    assert (config.train_backend, config.megatron.megatron_tp) == ("megatron", 2)
    both = parse(BenchConfig, ["step", "--train-backend", "fsdp,megatron"], "x")
    assert both.train_backend == "fsdp,megatron"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--num_generations", "8"], "--num_generations: unknown flag. It is --n-samples-per-"),
        (["--max-completion-length=8"], "It is --rollout-max-response-len here."),
        (["--num-generatoins", "8"], "unknown flag. See"),
        (
            ["--prompt-data", "a.jsonl", "actor_rollout_ref.rollout.n=8"],
            "actor_rollout_ref.rollout.n=8: is an override of verl's, and flags are --name VALUE. "
            "It is --n-samples-per-prompt here.",
        ),
        (["+trainer.logger=console"], "+trainer.logger=console: is an override of verl's"),
    ],
)  # fmt: skip
def test_names_of_other_libraries_are_told_by_ours(argv, says):
    with pytest.raises(ConfigError) as refused:
        train(*argv)
    assert says in str(refused.value)


def test_every_flag_that_another_librarys_name_is_told_by_is_one():
    from onpolicy.cli.other_names import OURS

    assert {*OURS.values()} <= {*flag_types(TrainConfig)}


def test_a_named_evaluation_set_is_no_override():
    config = train("--eval-prompt-data", "data=a.jsonl", "math.test=b.jsonl")
    assert len(flag_values(config)["eval_prompt_data"]) == 2
