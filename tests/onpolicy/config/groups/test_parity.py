"""--align: which kinds it takes, what it cannot go with, and in which commands."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.config.explain import ExplainConfig
from onpolicy.config.groups import OperatorsConfig
from onpolicy.config.tools import BenchConfig, ServeConfig, VerifyConfig
from onpolicy.contract import KINDS, PORTABLE_KERNELS
from onpolicy.errors import ConfigError

GOOD = ["--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl", "--rm-type", "exact"]
ALIGN = ["--align", "linear,attention"]
STOCK = ["--no-true-on-policy-mode"]


def train(*argv):
    validate(parse(TrainConfig, [*GOOD, *argv], "onpolicy train"))


def in_tool(config_class, *what):
    def run(*argv):
        validate(parse(config_class, [*what, "--hf-checkpoint", "/m", *argv], "onpolicy"))

    return run


TOOLS = {
    "verify": in_tool(VerifyConfig),
    "explain": in_tool(ExplainConfig),
    "serve": in_tool(ServeConfig),
}


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        ("", ()),
        ("model", ("model",)),
        ("attention,linear", ("model", "linear", "attention")),
        (",".join(reversed(KINDS)), KINDS),
    ],
)
def test_kinds_come_in_one_order_and_with_the_model(asked, kinds):
    assert OperatorsConfig(align=asked).kinds == kinds


@pytest.mark.parametrize("command", ["train", *TOOLS])
def test_every_command_takes_a_list_and_refuses_unknown_kinds(command):
    run, others = (train, []) if command == "train" else (TOOLS[command], STOCK)
    run(*others, *ALIGN)
    run(*others, *ALIGN, "--operators", "cpu")
    for wrong in ("linears", "linear,", "linear attention", "linear, attention"):
        with pytest.raises(
            ConfigError, match=r"--align='linear.*of model, linear, attention, norm"
        ):
            run(*others, "--align", wrong)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_mode_and_a_part_of_it_contradict_each_other(tool):
    message = r"--align=linear,attention: with --true-on-policy-mode.*--no-true-on-policy-mode"
    with pytest.raises(ConfigError, match=message):
        TOOLS[tool](*ALIGN)
    with pytest.raises(ConfigError, match=message):
        train(*ALIGN, "--true-on-policy-mode")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--train-backend", "megatron"], "--align=.*--train-backend megatron"),
        (["--sglang-tp-size", "2"], "--align=.*--sglang-tp-size 2"),
        (["--row-parallel-blocks", "2"], "--row-parallel-blocks=2"),
        (["--rollout-weight-format", "int4"], "--rollout-weight-format=int4: with --align"),
        (["--use-rollout-routing-replay"], "--use-rollout-routing-replay=True: with --align"),
        (["--mismatch-governor"], "--mismatch-governor=True: .*--align"),
        (
            ["--mismatch-governor", "--governor-highest", "mis"],
            "--mismatch-governor=True: .*--align",
        ),
        (["--sglang-quantization", "fp8"], "--sglang-quantization: not with --align"),
        (["--parity-policy", "fallback", "--use-tis"], "--parity-policy=fallback: without aligned"),
    ],
)
def test_what_a_part_cannot_go_with_is_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        train(*ALIGN, *argv)


def test_portable_operators_are_for_all_kinds(monkeypatch):
    for name in PORTABLE_KERNELS:  # which whoever starts the tests may have chosen
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="--align=linear: --operators portable is for all kinds"):
        train("--operators", "portable", "--align", "linear")


def test_one_token_is_no_choice_for_the_aligned_sampler():
    train(*ALIGN, "--rollout-top-k", "1")
    with pytest.raises(ConfigError, match=r"--rollout-top-k=1: with --align log-probabilities"):
        train("--align", "log_probs", "--rollout-top-k", "1")


def test_a_part_promises_nothing_so_corrections_and_warnings_are_the_stock_runs():
    config = parse(TrainConfig, [*GOOD, *ALIGN, "--use-tis"], "onpolicy train")
    validate(config)
    assert not config.plan.may_align and config.plan.on_aligned_mismatch == "warn"


def test_bench_reads_no_list():
    with pytest.raises(
        ConfigError, match="--align=linear,attention: only a command other than bench"
    ):
        in_tool(BenchConfig, "step")(*ALIGN)


@pytest.mark.parametrize(
    "argv",
    [
        [*STOCK],
        [*STOCK, *ALIGN],
        ["--case", "c.json"],
        ["--train-backend", "megatron"],
        ["--sglang-tp-size", "2", "--row-parallel-blocks", "2"],
    ],
    ids=["stock", "part", "case", "megatron", "ranks"],
)
def test_an_attribution_has_contracts_of_its_own(argv):
    TOOLS["explain"]("--attribution", "kinds")
    TOOLS["explain"](*argv)
    with pytest.raises(ConfigError, match=r"--attribution=layers: .* Leave one of the two out"):
        TOOLS["explain"]("--attribution", "layers", *argv)


def test_a_weight_format_is_for_commands_that_round():
    asked = ("--rollout-weight-format", "int4")
    for tool in TOOLS.values():
        tool(*asked)
    with pytest.raises(ConfigError, match=r"--rollout-weight-format=int4: .*the run that pushes"):
        TOOLS["serve"](*asked, *STOCK)
    with pytest.raises(ConfigError, match=r"--rollout-weight-format=int4: --attribution"):
        TOOLS["explain"](*asked, "--attribution", "kinds")


def test_rounded_inputs_are_for_engines_that_both_have_them():
    asked = ("--rollout-activation-format", "fp8_e4m3")
    for tool in TOOLS.values():
        tool(*asked)
        with pytest.raises(
            ConfigError, match=r"--rollout-activation-format=fp8_e4m3: both engines"
        ):
            tool(*asked, *STOCK)
