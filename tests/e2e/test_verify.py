"""`onpolicy verify` on real engines: sampling, a real update, a push, and sampling again."""

import json

import pytest

from onpolicy.cli.main import main
from onpolicy.config.groups import ModelConfig, OperatorsConfig, ServersConfig
from onpolicy.config.tool_flags import VerifyConfig
from onpolicy.models.lora.adapters import without_adapters
from onpolicy.run.commands.verification import passes, verify
from onpolicy.training import loss_scale
from onpolicy.training.policy_trainer import PolicyTrainer
from tests.onpolicy.training.fsdp.test_adapters import drawn
from tests.onpolicy.training.fsdp.test_trainer import maker_of
from tests.support.bytes_on_cpu import FORMATS, SIZES
from tests.support.engines_of_bytes import engines_of_bytes
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import TWO_RANKS, onpolicy

pytestmark = pytest.mark.engine

KEYS = {
    "num_compared_tokens", "num_mismatched_tokens", "max_abs_diff", "max_ulp", "k3_kl_mean",
    "k3_kl_max", "num_cached_tokens", "optimizer_steps", "versions", "contract",
    "num_redrawn_tokens", "num_drawn_otherwise_tokens",
}  # fmt: skip


def verified(model, directory, dtype="bfloat16", prompts=6, tokens=12, **more):
    """The report of a verification that passes, with every token compared twice."""
    config = VerifyConfig(
        model=ModelConfig(hf_checkpoint=str(model), dtype=dtype),
        num_prompts=prompts, max_new_tokens=tokens, run_dir=str(directory / "run"), **more,
    )  # fmt: skip
    report = verify(config)
    assert report["num_compared_tokens"] == 2 * prompts * tokens
    assert passes(report, config)
    return report


# Qwen3 and Llama are in the tests on two ranks; tests/onpolicy/models has others without a server.
@pytest.mark.parametrize(
    "architecture", ["qwen3-tied", "qwen2", "qwen3-moe", "mixtral", "glm4-moe"]
)
def test_no_token_differs_in_float32(architecture, tmp_path):
    model = make_checkpoint(tmp_path / "model", architecture)
    report = verified(model, tmp_path, "float32", 12, 24, temperature=0.7)
    assert report.keys() == KEYS
    assert report["num_mismatched_tokens"] == report["max_ulp"] == report["k3_kl_max"] == 0
    assert report["num_cached_tokens"] > 0


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("phi", "bfloat16"), ("phimoe", "float16"), ("nemotron", "float16")],
    ids=["head bias", "sparsemixer", "layernorm1p"],
)
def test_no_token_differs_where_heads_routers_or_norms_are_unusual(
    architecture, dtype, tmp_path, monkeypatch
):
    """In float16 the loss's scale is too large at first, and the step is repeated until it is taken."""
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**36)
    train, skipped = PolicyTrainer.train, []

    def noted(trainer, *args, **kwargs):
        outcome = train(trainer, *args, **kwargs)
        skipped.append(outcome.metrics.get("train/skipped_share"))
        return outcome

    monkeypatch.setattr(PolicyTrainer, "train", noted)
    report = verified(make_checkpoint(tmp_path / "model", architecture), tmp_path, dtype)
    assert report["contract"]["dtype"] == dtype
    if dtype == "float16":
        assert len(skipped) > 1 and skipped == [*[1.0] * (len(skipped) - 1), 0.0]


def test_no_token_differs_where_both_engines_round(tmp_path):
    """Two ranks of a server hold parts of blocks; Megatron, and a whole server: test_megatron.py."""
    formats = {
        "rollout_weight_format": "fp8_e4m3_block128", "rollout_activation_format": "fp8_e4m3",
    }  # fmt: skip
    report = verified(
        make_checkpoint(tmp_path / "model", "qwen3-moe"), tmp_path,
        operators=OperatorsConfig(row_parallel_blocks=2), servers=ServersConfig(**formats),
        sglang_args=("--tp-size", "2"),
    )  # fmt: skip
    assert report["contract"]["weight_format"] == "fp8_e4m3_block128"
    assert report["contract"]["activation_format"] == "fp8_e4m3"


def test_no_token_differs_where_both_engines_multiply_bytes(tmp_path):
    """By a stand-in: two ranks of a server, which makes its bytes anew after a push."""
    path = make_checkpoint(tmp_path / "model", "qwen3", **SIZES)
    two_ranks = {"servers": ServersConfig(**FORMATS), "sglang_args": ("--tp-size", "2")}
    two_ranks["operators"] = OperatorsConfig(operators="cpu")  # for which there is the stand-in
    with engines_of_bytes(tmp_path) as multiplied:
        verified(path, tmp_path, prompts=4, **two_ranks)
    assert len([*multiplied.iterdir()]) == 3


@pytest.mark.runs
def test_no_token_differs_beside_an_adapter_and_all_do_where_one_engine_has_none(
    tmp_path, capsys, monkeypatch
):
    """One that another run has left, with experts."""
    model, adapter = make_checkpoint(tmp_path / "model", "qwen3-moe"), tmp_path / "adapter"
    drawn(maker_of(model)(lora={"lora_rank": 4})).export(adapter)
    argv = ["verify", "--hf-checkpoint", str(model), "--lora-adapter", str(adapter)]
    argv += ["--num-prompts", "4", "--max-new-tokens", "12", "--run-dir", str(tmp_path / "run")]
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


# A dense model is verified so by the installed package (tests/test_packages.py).
def test_no_token_differs_on_two_ranks_in_bfloat16(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3-moe")
    file = tmp_path / "report.json"
    onpolicy(
        "verify", *TWO_RANKS, "--hf-checkpoint", checkpoint, "--num-prompts", "8",
        "--max-new-tokens", "16", "--json", file, "--run-dir", tmp_path / "run",
        "--cpu-threads", "1",
    )  # fmt: skip
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
