"""Which values are secrets, and where they do not show."""

import argparse
import dataclasses

import pytest

from onpolicy.config import TrainConfig, groups, secrets, validate
from onpolicy.errors import ConfigError

GIVEN = (
    "--tp-size", "2", "--admin-api-key", "A", "--ssl-keyfile-password=B", "--ssl-keyfile", "f",
)  # fmt: skip


def test_secrets_are_told_from_other_arguments_by_the_flags_name():
    others, found = secrets.split(GIVEN)
    assert others == ["--tp-size", "2", "--ssl-keyfile", "f"]
    assert found == {"--admin-api-key": "A", "--ssl-keyfile-password": "B"}


def test_an_empty_secret_and_one_without_a_value_stay_what_they_are():
    assert secrets.split(["--api-key=", "--tp-size", "2"])[1] == {"--api-key": ""}
    assert secrets.split(["--admin-api-key"])[1] == {"--admin-api-key": ""}


def test_every_flag_of_sglang_whose_value_is_a_secret_is_known():
    server_args = pytest.importorskip("sglang.srt.server_args")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    server_args.ServerArgs.add_cli_args(parser)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    named = {f for f in flags if any(w in f for w in ("key", "pass", "secret", "cred", "auth"))}
    no_secrets = {"--ssl-keyfile", "--prefill-delayer-max-delay-passes"}  # a path; a number
    no_secrets |= {"--prefill-delayer-forward-passes-buckets", "--enable-forward-pass-metrics"}
    no_secrets |= {f for f in named if f.startswith("--forward-pass-metrics")}
    assert {flag for flag in named if not secrets.is_secret(flag)} == no_secrets & named
    assert {f for f in flags if secrets.is_secret(f)} == {
        "--api-key", "--admin-api-key", "--ssl-keyfile-password",
    }  # fmt: skip


def config_with(**changes):
    values = {
        "model": groups.ModelConfig(hf_checkpoint="m"),
        "data": groups.DataConfig(prompt_data=("p",)),
        "reward": groups.RewardConfig(rm_type="math"),
        **changes,
    }
    return TrainConfig(**values)


def test_no_secret_is_written_down_with_the_configuration():
    engine = groups.EngineConfig(rollout_api_key="K")
    written = config_with(engine=engine, sglang_args=GIVEN).to_dict()
    assert written["rollout_api_key"] == "..."
    kept = ["--tp-size", "2", "--ssl-keyfile", "f"]
    hidden = ["--admin-api-key=...", "--ssl-keyfile-password=..."]
    assert sorted(written["sglang_args"]) == sorted([*kept, *hidden])


def test_no_secret_is_in_an_error():
    engine = groups.EngineConfig(rollout_server_url=("http://e",))
    with pytest.raises(ConfigError, match=r"--admin-api-key=\.\.\.") as error:
        validate(config_with(engine=engine, sglang_args=("--admin-api-key", "hush")))
    assert "hush" not in str(error.value)


def test_a_secret_can_come_from_a_file(tmp_path):
    file = tmp_path / "key"
    file.write_text("K\n")
    assert secrets.reveal("--x-key", f"@{file}") == "K"
    assert secrets.reveal("--x-key", "K@") == "K@"


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), (b"", "is empty")])
@pytest.mark.parametrize("flag", ["--rollout-api-key", "--sglang-admin-api-key"])
def test_a_file_without_a_secret_is_refused_before_anything_starts(tmp_path, content, reason, flag):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    config = config_with(engine=groups.EngineConfig(rollout_api_key=f"@{file}"))
    if flag.startswith("--sglang"):
        config = dataclasses.replace(
            config, engine=groups.EngineConfig(), sglang_args=(f"--admin-api-key=@{file}",)
        )
    with pytest.raises(ConfigError, match=f"{flag}=@{file}: .*{reason}"):
        validate(config)
