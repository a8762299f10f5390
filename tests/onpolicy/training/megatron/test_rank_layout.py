"""What cannot be laid out is refused by name, value, rule and remedy, before anything is started."""

import dataclasses
import importlib.metadata

import pytest
from transformers import AutoConfig

from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch.contracts import contract_for
from onpolicy.training.megatron import make
from onpolicy.training.megatron.make import MEGATRON_CORE, require_megatron
from onpolicy.training.megatron.rank_layout import MegatronLayout
from tests.support.bytes_on_cpu import SIZES
from tests.support.megatron_ranks import make_contract
from tests.support.megatron_training import Job
from tests.support.tiny import make_checkpoint

TP, PP, CP, EP = (
    f"{kind}_model_parallel_size" if kind != "context" else "context_parallel_size"
    for kind in ("tensor", "pipeline", "context", "expert")
)


def check(path, world_size=8, blocks=8, changes=None, dtype="bfloat16", **sizes):
    config = AutoConfig.from_pretrained(path)
    for name, value in (changes or {}).items():
        setattr(config, name, value)
    contract = dataclasses.replace(make_contract(path), row_parallel_blocks=blocks, dtype=dtype)
    MegatronLayout(**sizes).check(config, contract, world_size)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "mistral", "smollm3", "olmo2"])
def test_degrees_that_divide_are_accepted(model_of, architecture):
    check(model_of(architecture))
    check(model_of(architecture), **{TP: 2, PP: 2, CP: 2})


@pytest.mark.parametrize("architecture", ["qwen3-moe", "mixtral", "qwen2-moe", "glm4-moe"])
def test_degrees_that_divide_experts_are_accepted(model_of, architecture):
    check(model_of(architecture), **{TP: 2, PP: 2, CP: 2})
    check(model_of(architecture), **{EP: 2})


def test_experts_are_shared_by_ranks_that_hold_different_tokens(model_of):
    check(model_of("qwen3-moe"), world_size=2, **{EP: 2, CP: 2})
    check(model_of("qwen3-moe"), world_size=4, **{EP: 2, TP: 2}, sequence_parallel=True)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({TP: 0}, r"--megatron-tp=0: must be at least 1"),
        ({TP: 4}, r"--megatron-tp=4: does not divide num_key_value_heads=2"),
        ({PP: 3}, r"--megatron-pp=3: does not divide num_hidden_layers=4"),
        ({TP: 2, "blocks": 1}, r"--megatron-tp=2: .* row_parallel_blocks=1"),
        ({CP: 2, "world_size": 3}, r"world_size=3: no multiple of 2 ="),
        ({"sequence_parallel": True}, r"--megatron-sequence-parallel: .*Leave it out"),
        ({EP: 4}, r"--megatron-ep=4: does not divide num_experts=6"),
        ({EP: 3, "world_size": 4}, r"--megatron-ep=3: .* the 4 ranks"),
        ({EP: 2, TP: 2}, r"--megatron-ep=2: .* needs --megatron-sequence-parallel"),
        ({TP: 2, "changes": {"moe_intermediate_size": 71}}, r"moe_intermediate_size=71"),
        ({TP: 2, "changes": {"intermediate_size": 207}}, r"intermediate_size=207"),
        ({"dtype": "float16"}, r"--dtype=float16: .*does not scale the loss.*--train-backend fsdp"),
    ],
)
def test_what_does_not_divide_is_refused(model_of, sizes, message):
    with pytest.raises(ConfigError, match=message):
        check(model_of("qwen3-moe"), **sizes)


def test_sizes_have_the_names_of_their_configuration(model_of):
    with pytest.raises(ConfigError, match="does not divide num_local_experts=6"):
        check(model_of("mixtral"), **{EP: 4})


def test_a_dense_model_has_no_experts_to_share(model_of):
    with pytest.raises(ConfigError, match=r"--megatron-ep=2: this model has no experts"):
        check(model_of("qwen3"), **{EP: 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, r"architecture=GemmaForCausalLM.*fsdp"),
        ({"attention_bias": True}, r"attention_bias=True.*fsdp"),
        ({"mlp_bias": True}, r"mlp_bias=True.*fsdp"),
    ],
)
def test_models_it_does_not_know_are_refused(model_of, changes, message):
    with pytest.raises(ConfigError, match=message):
        check(model_of("llama"), changes=changes)


def test_what_runs_without_cuda_names_says_so():
    assert not MegatronLayout(
        tensor_model_parallel_size=2, context_parallel_size=2
    ).needs_cuda_names
    assert not MegatronLayout(expert_model_parallel_size=2).needs_cuda_names
    assert MegatronLayout(pipeline_model_parallel_size=2).needs_cuda_names
    assert MegatronLayout(tensor_model_parallel_size=2, sequence_parallel=True).needs_cuda_names
    assert MegatronLayout(recompute_activations=True).needs_cuda_names


def test_the_pinned_version_is_installed_and_accepted():
    require_megatron()


def test_another_version_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(make, "version", lambda name: "0.17.0")
    with pytest.raises(
        ConfigError, match=rf"megatron-core==0\.17\.0.*pip install.*{MEGATRON_CORE}"
    ):
        require_megatron()


def test_a_missing_package_is_said_with_the_remedy(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(make, "version", missing)
    with pytest.raises(ConfigError, match=r"not installed.*pip install.*--train-backend fsdp"):
        require_megatron()


@pytest.mark.parametrize(("head_dim", "is_whole"), [(128, True), (64, False)])
def test_heads_that_are_no_whole_blocks_of_bytes_are_refused(tmp_path, head_dim, is_whole):
    """With 4 of 64 numbers each linear has whole ones, and q, k and v joined head by head have not."""
    sizes = {"head_dim": head_dim, "num_attention_heads": 4, "num_key_value_heads": 4}
    path = make_checkpoint(tmp_path, "qwen3", **{**SIZES, **sizes})
    config, hf_config = Job(path=path).config(), load_config(str(path))
    contract = contract_for(config, hf_config, aligned=True)
    operators = dataclasses.replace(config.operators, operators="hopper_fp8")
    config = dataclasses.replace(config, operators=operators)
    if is_whole:
        make.check(config, hf_config, contract)
        return
    with pytest.raises(ConfigError, match=r"hopper_fp8: head_dim=64, .*of the 128 rows.*fsdp"):
        make.check(config, hf_config, contract)
