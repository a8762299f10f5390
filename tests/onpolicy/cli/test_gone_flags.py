import pytest

from onpolicy.cli import gone_flags
from onpolicy.cli.gone_flags import GONE
from onpolicy.cli.main import COMMANDS, main
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.config.flags import flag_types, spelled
from onpolicy.config.tool_flags import BenchConfig, ExplainConfig, ServeConfig, VerifyConfig
from onpolicy.errors import ConfigError


@pytest.fixture(autouse=True)
def gone(monkeypatch):
    table = {"--old": "Use --lr.", "--lr 7": "Use --lr 8.", "sing": "Use onpolicy train."}
    monkeypatch.setattr(gone_flags, "GONE", table)
    monkeypatch.setattr("onpolicy.cli.main.GONE", table)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--old"], "--old: was removed from onpolicy. Use --lr."),
        (["--seed", "1", "--old", "x"], "--old: was removed from onpolicy. Use --lr."),
        (["--no-old"], "--old: was removed from onpolicy. Use --lr."),
        (["--old=x"], "--old: was removed from onpolicy. Use --lr."),
        (["--lr", "7"], "--lr 7: was removed from onpolicy. Use --lr 8."),
        (["--lr=7"], "--lr 7: was removed from onpolicy. Use --lr 8."),
    ],
)  # fmt: skip
def test_a_flag_or_a_value_that_is_gone_is_refused_with_what_to_use(argv, says):
    with pytest.raises(ConfigError) as refused:
        parse(TrainConfig, argv, "onpolicy train")
    assert str(refused.value) == says


@pytest.mark.parametrize("line", ["old: 1", "lr: 7"])
def test_it_is_refused_in_a_file_too(tmp_path, line):
    (tmp_path / "config.yaml").write_text(line)
    with pytest.raises(ConfigError, match=r"was removed from onpolicy\. Use --lr"):
        parse(TrainConfig, ["--custom-config-path", str(tmp_path / "config.yaml")], "x")


def test_a_value_that_stays_is_taken():
    assert parse(TrainConfig, ["--lr", "8"], "x").trainer.lr == 8


def test_a_command_that_is_gone_is_refused_with_what_to_use(capsys):
    assert main(["sing"]) == 2
    assert "unknown command 'sing'. It was removed. Use onpolicy train." in capsys.readouterr().err


def test_nothing_that_exists_is_called_gone():
    commands = (TrainConfig, ExplainConfig, VerifyConfig, BenchConfig, ServeConfig)
    flags = {spelled(name) for command in commands for name in flag_types(command)}
    assert not {*GONE} & {*flags, *COMMANDS}
