"""`onpolicy verify` on real engines: sampling, a real update, a push, and sampling again."""

import json
import subprocess
import sys

import pytest

from onpolicy.cli.main import main
from onpolicy.config.groups import ModelConfig, OperatorsConfig, ServersConfig
from onpolicy.config.tools import VerifyConfig
from onpolicy.models.lora.adapters import without_adapters
from onpolicy.run.commands.verify import passes, verify
from onpolicy.train.policy_trainer import PolicyTrainer
from tests.onpolicy.train.fsdp.test_peft import drawn
from tests.onpolicy.train.fsdp.test_trainer import maker_of
from tests.support.bytes_on_cpu import FORMATS, SIZES
from tests.support.engines_of_bytes import engines_of_bytes
from tests.support.tiny import ARCHITECTURES, make_checkpoint
from tests.support.train_runs import TWO_RANKS

pytestmark = pytest.mark.engine

KEYS = {
    "num_compared_tokens", "num_mismatched_tokens", "max_abs_diff", "max_ulp", "k3_kl_mean",
    "k3_kl_max", "num_cached_tokens", "optimizer_steps", "versions", "contract",
    "num_redrawn_tokens", "num_drawn_otherwise_tokens",
}  # fmt: skip


# The untied Qwen3 is in the test on two ranks.
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "qwen3"])
def test_no_token_differs_in_float32(architecture, tmp_path):
    config = VerifyConfig(
        model=ModelConfig(
            hf_checkpoint=str(make_checkpoint(tmp_path / "model", architecture)), dtype="float32"
        ),
        temperature=0.7,
        num_prompts=12,
        max_new_tokens=24,
        run_dir=str(tmp_path / "run"),
    )
    report = verify(config)
    assert report.keys() == KEYS
    assert report["num_compared_tokens"] == 2 * 12 * 24
    assert report["num_mismatched_tokens"] == report["max_ulp"] == report["k3_kl_max"] == 0
    assert report["num_cached_tokens"] > 0
    assert passes(report, config)


@pytest.mark.parametrize(
    "architecture", ["phi", "phimoe", "nemotron"], ids=["head bias", "sparsemixer", "layernorm1p"]
)
def test_no_token_differs_where_heads_routers_or_norms_are_unusual(architecture, tmp_path):
    config = VerifyConfig(
        model=ModelConfig(
            hf_checkpoint=str(make_checkpoint(tmp_path / "model", architecture)), dtype="bfloat16"
        ),
        num_prompts=6,
        max_new_tokens=12,
        run_dir=str(tmp_path / "run"),
    )
    report = verify(config)
    assert report["num_compared_tokens"] == 2 * 6 * 12
    assert passes(report, config)


def test_no_token_differs_where_both_engines_round(tmp_path):
    """Two ranks of a server hold parts of blocks; Megatron, and a whole server: test_megatron.py."""
    path = make_checkpoint(tmp_path / "model", "qwen3-moe")
    config = VerifyConfig(
        model=ModelConfig(hf_checkpoint=str(path)),
        operators=OperatorsConfig(row_parallel_blocks=2),
        servers=ServersConfig(
            rollout_weight_format="fp8_e4m3_block128",
            rollout_activation_format="fp8_e4m3",
        ),
        sglang_args=("--tp-size", "2"),
        num_prompts=6,
        max_new_tokens=12,
        run_dir=str(tmp_path / "run"),
    )
    report = verify(config)
    assert report["num_compared_tokens"] == 2 * 6 * 12
    assert report["contract"]["weight_format"] == "fp8_e4m3_block128"
    assert report["contract"]["activation_format"] == "fp8_e4m3"
    assert passes(report, config)


def test_no_token_differs_where_both_engines_multiply_bytes(tmp_path):
    """By a stand-in: two ranks of a server, which makes its bytes anew after a push."""
    path = make_checkpoint(tmp_path / "model", "qwen3", **SIZES)
    config = VerifyConfig(
        model=ModelConfig(hf_checkpoint=str(path)),
        servers=ServersConfig(**FORMATS),
        sglang_args=("--tp-size", "2"),
        num_prompts=4,
        max_new_tokens=12,
        run_dir=str(tmp_path / "run"),
    )
    with engines_of_bytes(tmp_path) as multiplied:
        report = verify(config)
    assert report["num_compared_tokens"] == 2 * 4 * 12
    assert passes(report, config)
    assert len([*multiplied.iterdir()]) == 3


@pytest.mark.runs
@pytest.mark.parametrize("given", ["a rank", "an adapter"])
def test_no_token_differs_beside_adapters_and_all_do_where_one_engine_has_none(
    tmp_path, capsys, monkeypatch, given
):
    model = make_checkpoint(tmp_path / "model", "qwen3-moe")
    lora = ["--lora-rank", "4"]
    if given == "an adapter":
        lora = ["--lora-adapter", str(write_adapter(tmp_path / "adapter", model))]
    argv = ["verify", "--hf-checkpoint", str(model), *lora, "--num-prompts", "4"]
    argv += ["--max-new-tokens", "12", "--run-dir", str(tmp_path / "run")]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_compared_tokens"] == 2 * 4 * 12
    assert report["num_mismatched_tokens"] == 0 and report["contract"]["adapter"]["rank"] == 4

    rescore = PolicyTrainer.rescore

    def of_the_base(trainer, *asked):
        with without_adapters(trainer.policy.module):
            return rescore(trainer, *asked)

    monkeypatch.setattr(PolicyTrainer, "rescore", of_the_base)
    assert main([*argv, "--no-step"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["num_mismatched_tokens"] > 0.9 * report["num_compared_tokens"]


def write_adapter(directory, model):
    """As another run leaves it, with experts."""
    trainer = drawn(maker_of(model)(lora={"lora_rank": 4}))
    trainer.export(directory)
    return directory


def test_stock_operators_are_measured_and_no_failure(checkpoint, tmp_path, capsys):
    file = tmp_path / "report.json"
    code = main([
        "verify", "--hf-checkpoint", str(checkpoint), "--no-true-on-policy-mode",
        "--num-prompts", "8", "--max-new-tokens", "16", "--json", str(file),
        "--run-dir", str(tmp_path / "run"),
    ])  # fmt: skip
    report = json.loads(file.read_text())
    assert code == 0
    # How many differ is up to the machine's kernels; docs/bitwise_parity.md has examples.
    assert 0 <= report["num_mismatched_tokens"] <= report["num_compared_tokens"] == 2 * 8 * 16
    assert (report["max_abs_diff"] > 0) == (report["num_mismatched_tokens"] > 0)
    assert report["contract"]["backend"] == "stock"
    assert json.loads(capsys.readouterr().out) == report


def test_without_a_step_nothing_is_trained_and_no_token_differs(
    checkpoint, tmp_path, capsys, monkeypatch
):
    def train(*_, **__):
        raise AssertionError("a step was taken")

    monkeypatch.setattr(PolicyTrainer, "train", train)
    code = main([
        "verify", "--hf-checkpoint", str(checkpoint), "--no-step", "--num-prompts", "8",
        "--max-new-tokens", "16", "--run-dir", str(tmp_path / "run"),
    ])  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert code == report["num_mismatched_tokens"] == report["optimizer_steps"] == 0
    assert report["num_compared_tokens"] == 2 * 8 * 16


def test_a_mismatch_is_a_failure_in_true_on_policy_mode():
    config = VerifyConfig(num_prompts=1, max_new_tokens=1)
    good = {"num_mismatched_tokens": 0, "num_compared_tokens": 2, "num_cached_tokens": 1}
    good |= {"num_redrawn_tokens": 2, "num_drawn_otherwise_tokens": 0}
    assert passes(good, config)
    for wrong in (
        {"num_mismatched_tokens": 1},
        {"num_compared_tokens": 0},
        {"num_cached_tokens": 0},
        {"num_redrawn_tokens": 1},
        {"num_drawn_otherwise_tokens": 1},
    ):
        assert not passes({**good, **wrong}, config)


@pytest.mark.parametrize(
    "architecture",
    [pytest.param("qwen3", marks=[pytest.mark.anew, pytest.mark.runs]), "qwen3-moe"],
)
def test_no_token_differs_on_two_ranks_in_bfloat16(architecture, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", architecture)
    file = tmp_path / "report.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "onpolicy.cli", "verify", *TWO_RANKS,
            "--hf-checkpoint", str(checkpoint), "--num-prompts", "8", "--max-new-tokens", "16",
            "--json", str(file), "--run-dir", str(tmp_path / "run"), "--cpu-threads", "1",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(file.read_text())
    assert report["num_compared_tokens"] == 2 * 8 * 16
    assert report["num_mismatched_tokens"] == 0


# A dense one with blocks for this degree is in test_tensor_parallel.py.
@pytest.mark.runs
@pytest.mark.parametrize("architecture", ["llama", "qwen3-moe"])
def test_no_token_differs_with_a_rollout_on_two_tensor_parallel_ranks(
    architecture, tmp_path, capsys
):
    """Blocks for a degree that neither engine has: what runs of other degrees would sum, too."""
    code = main([
        "verify", "--hf-checkpoint", str(make_checkpoint(tmp_path / "model", architecture)),
        "--num-prompts", "8", "--max-new-tokens", "16", "--cpu-threads", "1",
        "--sglang-tp-size", "2", "--row-parallel-blocks", "4", "--run-dir", str(tmp_path / "run"),
    ])  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert code == report["num_mismatched_tokens"] == 0
    assert report["num_compared_tokens"] == 2 * 8 * 16
    assert report["contract"]["row_parallel_blocks"] == 4
