"""What a contract is refused for before anything is started, and that all commands make the same."""

import pytest
import torch

from onpolicy.bench.setting import make_train_config
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, groups
from onpolicy.config.tool_flags import BenchConfig, ServeConfig, VerifyConfig
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.run.commands import verification
from onpolicy.run.launch import contracts
from onpolicy.run.launch.contracts import contract_for
from tests.support.bytes_on_cpu import SIZES
from tests.support.tiny import make_checkpoint


def contract(checkpoint, *, aligned=True, **operators):
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=str(checkpoint)),
        parity=groups.ParityConfig(true_on_policy_mode=aligned),
        operators=groups.OperatorsConfig(**operators),
    )
    return contract_for(config, load_config(str(checkpoint)), aligned=aligned)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_the_operators_are_the_cpus(checkpoint, caplog):
    caplog.set_level("INFO", "onpolicy")
    made = contract(checkpoint, operators="cpu")
    assert (made.backend, made.device, made.model_definition) == ("cpu", "cpu", "transformers")
    assert "aligned operators: cpu, bfloat16" in caplog.text
    assert contract(checkpoint).device == "cpu"
    with pytest.raises(ConfigError, match=r"--operators=hopper: this machine has no GPU"):
        contract(checkpoint, operators="hopper")


def test_a_variable_that_breaks_alignment_is_refused_in_aligned_runs_only(checkpoint, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(ConfigError, match=r"NVIDIA_TF32_OVERRIDE=1: not with"):
        contract(checkpoint)
    assert contract(checkpoint, aligned=False).backend == "stock"


def of_bytes(path, weights="fp8_e4m3_block128", inputs="fp8_e4m3", blocks=1):
    config = TrainConfig(
        parity=groups.ParityConfig(true_on_policy_mode=True),
        engine=groups.EngineConfig(rollout_weight_format=weights, rollout_activation_format=inputs),
        operators=groups.OperatorsConfig(row_parallel_blocks=blocks),
    )
    return contract_for(config, load_config(str(path)), aligned=True)


def test_products_of_bytes_are_told_apart_by_the_contract(checkpoint, tmp_path, monkeypatch):
    whole = make_checkpoint(tmp_path, "qwen3", **SIZES)
    in_bfloat16 = of_bytes(whole)
    monkeypatch.setattr(contracts, "choose_backend", lambda *_: "hopper_fp8")
    made = of_bytes(whole)
    assert made.backend == "hopper_fp8"
    assert made.fingerprint != in_bfloat16.fingerprint
    assert of_bytes(whole, blocks=2).row_parallel_blocks == 2


@pytest.mark.parametrize(
    ("formats", "blocks", "changes", "message"),
    [
        ({"inputs": "int8"}, 1, {}, r"bytes of weights and inputs.*Add --rollout-weight"),
        ({"weights": "fp8_e4m3"}, 1, {}, r"=hopper_fp8: .*fp8_e4m3_block128.*hopper\."),
        ({}, 4, {}, r"q_proj has 256 output .*up to 4 .*multiple of 512.*--operators hopper,"),
        ({}, 2, {"intermediate_size": 384}, r"gate_proj has 384 output .*up to 2"),
        ({}, 1, {"hidden_size": 192}, r"q_proj has 192 input channels, and 128 share a scale,"),
    ],
)  # fmt: skip
def test_what_has_no_whole_blocks_of_bytes_is_refused(
    formats, blocks, changes, message, tmp_path, monkeypatch
):
    path = make_checkpoint(tmp_path, "qwen3", **{**SIZES, **changes})
    monkeypatch.setattr(contracts, "choose_backend", lambda *_: "hopper_fp8")
    with pytest.raises(ConfigError, match=message):
        of_bytes(path, blocks=blocks, **formats)


def test_what_stays_in_bfloat16_needs_no_whole_blocks(tmp_path, monkeypatch):
    """The output projection, routers and experts."""
    sizes = {**SIZES, "vocab_size": 137, "moe_intermediate_size": 72, "num_experts": 6}
    path = make_checkpoint(tmp_path, "qwen3-moe", **sizes)
    monkeypatch.setattr(contracts, "choose_backend", lambda *_: "hopper_fp8")
    assert of_bytes(path).shapes.experts


@pytest.mark.parametrize("aligned", [False, True])
def test_llama4_is_served_within_its_first_chunk_alone(aligned, tmp_path):
    make_checkpoint(tmp_path / "chunks", "llama4", attention_chunk_size=200)
    make_checkpoint(tmp_path / "scale", "llama4", floor_scale=256)
    for name, limit in (("chunks", 200), ("scale", 255)):
        said = f"--sglang-context-length=256: beyond {limit} tokens .* Serve at most {limit} tokens"
        with pytest.raises(ConfigError, match=said):
            contract(tmp_path / name, aligned=aligned)
    untuned = {"floor_scale": 256, "attn_temperature_tuning": False}
    contract(make_checkpoint(tmp_path / "not", "llama4", **untuned), aligned=aligned)


@pytest.mark.parametrize("architecture", ["jamba", "minimax"])
def test_layers_that_mix_the_sequences_of_a_batch_are_not_trained_in_either_mode(
    architecture, tmp_path
):
    """Beside another sequence, a packed one had log-probabilities that differed by 1.2 and by 3.4."""
    path = make_checkpoint(tmp_path, architecture)
    for aligned in (False, True):
        with pytest.raises(ConfigError, match=r"carry the state of one sequence into the next"):
            contract(path, aligned=aligned)
    served = parse(ServeConfig, ["--hf-checkpoint", str(path), "--no-true-on-policy-mode"], "serve")
    assert contract_for(served, load_config(str(path)), aligned=False).backend == "stock"


SHARED = ["--dtype", "float32", "--row-parallel-blocks", "2", "--sglang-tp-size", "2"]


def test_experts_that_lie_in_one_tensor_are_not_rounded(tmp_path):
    path = make_checkpoint(tmp_path / "model", "gpt-oss")
    argv = ["--hf-checkpoint", str(path), "--rollout-weight-format", "int3"]
    with pytest.raises(
        ConfigError, match=r"--rollout-weight-format=int3: .*all experts of a layer"
    ):
        contract_for(parse(ServeConfig, argv, "x"), load_config(str(path)), aligned=True)


def test_every_command_makes_the_same_contract_of_the_same_flags(checkpoint):
    """A run finds a server of `onpolicy serve` under its own contract, and verify measures it."""
    hf_config = load_config(str(checkpoint))

    def parsed(config_class, *argv):
        return parse(config_class, [*argv, "--hf-checkpoint", str(checkpoint), *SHARED], "x")

    configs = [
        parsed(TrainConfig, "--true-on-policy-mode"),
        parsed(ServeConfig),
        verification.make_train_config(parsed(VerifyConfig), longest=100),
        make_train_config(parsed(BenchConfig, "step"), "aligned"),
    ]
    contracts = [contract_for(config, hf_config, aligned=True) for config in configs]
    assert len({made.fingerprint for made in contracts}) == 1
    assert (contracts[0].dtype, contracts[0].row_parallel_blocks) == ("float32", 2)


def test_a_stock_run_finds_a_stock_server_of_any_degree_under_its_own_contract(checkpoint):
    hf_config = load_config(str(checkpoint))
    path = ["--hf-checkpoint", str(checkpoint)]
    serve = parse(ServeConfig, [*path, "--no-true-on-policy-mode", "--sglang-tp-size", "2"], "x")
    contracts = [
        contract_for(c, hf_config, aligned=False) for c in (serve, parse(TrainConfig, path, "x"))
    ]
    assert contracts[0].fingerprint == contracts[1].fingerprint
    lora = parse(TrainConfig, [*path, "--lora-rank", "4"], "x")
    merging = contract_for(lora, hf_config, aligned=False)
    assert merging.adapter is not None and merging.of_engine == contracts[0]
