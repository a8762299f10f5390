"""Which layers are cut along K, and which models ranks can share."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from onpolicy.errors import ConfigError
from onpolicy.models.align import AlignedLinear, align_modules
from onpolicy.models.facts import ModelFacts
from onpolicy.models.size import operator_shapes
from onpolicy.models.tensor_parallel import require_shardable, row_parallel_linears
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.row_parallel import WHOLE, RowParallel
from tests.support.tiny import ALL_ARCHITECTURES, ARCHITECTURES, SIZES

DENSE = ("qwen3", "qwen3-tied", "qwen2", "llama", "mistral")


def config_of(architecture, **changes):
    config_class, sizes = ARCHITECTURES[architecture]
    return config_class(**{**SIZES, **sizes, **changes})


def model_of(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("architecture", DENSE)
def test_the_layers_after_heads_and_after_the_activation_are_cut(architecture):
    model = model_of(config_of(architecture))
    names = {
        name for name, module in model.named_modules() if module in row_parallel_linears(model)
    }
    assert names == {
        f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")
    }


@pytest.mark.parametrize("prefix", ["", "model.", r"model\.", r"^model\."])
def test_a_plan_is_read_with_and_without_the_models_prefix(prefix):
    config = config_of("llama")
    config.base_model_tp_plan = {f"{prefix}layers.*.mlp.up_proj": "ROWWISE-REP"}
    names = {m.out_features for m in row_parallel_linears(model_of(config))}
    assert names == (set() if prefix == r"^model\." else {208})  # SGLang's own: "model.^layers"


def test_the_first_pattern_that_matches_decides():
    config = config_of("llama")
    config.base_model_tp_plan = {"layers.*.mlp": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    assert row_parallel_linears(model_of(config)) == set()


def test_only_layers_that_are_cut_sum_in_blocks():
    model = model_of(config_of("qwen3"))
    align_modules(model, CpuOperators(), RowParallel(4))
    linears = {n: m for n, m in model.named_modules() if isinstance(m, AlignedLinear)}
    assert {name.split(".")[-1] for name, m in linears.items() if m.row_parallel.blocks == 4} == {
        "o_proj",
        "down_proj",
    }
    assert linears["lm_head"].row_parallel is WHOLE


def test_shapes_tell_layers_that_are_cut_from_the_others():
    facts = ModelFacts(config_of("qwen3"))
    whole, cut = operator_shapes(facts), operator_shapes(facts, row_parallel_blocks=2)
    assert whole.row_linear == ()
    assert cut.row_linear == ((96, 192, False), (96, 208, False))
    assert not set(cut.linear) & set(cut.row_linear)
    assert set(cut.linear) | set(cut.row_linear) == set(whole.linear)


def require(config, tp_size, blocks):
    facts = ModelFacts(config)
    shapes = operator_shapes(facts, row_parallel_blocks=blocks)
    require_shardable(facts, shapes, tp_size=tp_size, blocks=blocks)


@pytest.mark.parametrize(("tp_size", "blocks"), [(1, 1), (2, 2), (1, 8), (2, 16)])
@pytest.mark.parametrize("architecture", DENSE)
def test_sizes_that_ranks_and_blocks_divide_are_accepted(architecture, tp_size, blocks):
    require(config_of(architecture), tp_size, blocks)


@pytest.mark.parametrize(
    ("changes", "tp_size", "blocks", "message"),
    [
        ({}, 4, 4, r"--sglang-tp-size=4: does not divide kv_heads=2.*Choose a divisor"),
        ({"num_attention_heads": 6}, 4, 4, r"--sglang-tp-size=4: does not divide heads=6"),
        ({"intermediate_size": 210}, 2, 4, r"--row-parallel-blocks=4: .*in_features=210"),
        ({"head_dim": 6}, 1, 16, r"--row-parallel-blocks=16: does not divide in_features=24"),
    ],
)
def test_sizes_that_cannot_be_shared_are_refused_by_name(changes, tp_size, blocks, message):
    with pytest.raises(ConfigError, match=message):
        require(config_of("llama", **changes), tp_size, blocks)


@pytest.mark.parametrize("architecture", ["phi3", "glm4", "olmo2"])
def test_plans_that_gather_columns_and_split_inputs_are_shared_out(architecture):
    config_class, sizes = ALL_ARCHITECTURES[architecture]
    config = config_class(**{**SIZES, **sizes})
    require(config, 2, 2)
    cut = {m.in_features for m in row_parallel_linears(model_of(config))}
    assert cut == {config.num_attention_heads * 24, 208}


def test_a_layer_of_an_unknown_style_is_whole_on_one_rank_and_refused_on_more():
    config = config_of("llama")
    unknown = {
        "layers.*.mlp.up_proj": "packed_colwise",
        "layers.*.self_attn.k_proj": "mla_kv_a_proj",
    }
    config.base_model_tp_plan = config.base_model_tp_plan | unknown  # not the class's own
    require(config, 1, 1)
    with pytest.raises(ConfigError, match="calls layers mla_kv_a_proj, packed_colwise, and SGLang"):
        require(config, 2, 2)


def test_a_model_without_a_plan_is_refused_for_more_than_one_rank():
    config = config_of("llama")
    config.base_model_tp_plan = None
    require(config, 1, 1)
    with pytest.raises(ConfigError, match="model_type=llama has no base_model_tp_plan"):
        require(config, 2, 2)


def test_attention_that_a_plan_leaves_whole_is_refused_on_more_ranks():
    config_class, sizes = ALL_ARCHITECTURES["deepseek-v3"]
    config = config_class(**{**SIZES, **sizes})
    require(config, 1, 1)
    with pytest.raises(
        ConfigError, match="model_type=deepseek_v3 leaves DeepseekV3Attention whole"
    ):
        require(config, 1, 2)


@pytest.mark.parametrize(
    ("architecture", "experts"), [("llama4", "ChosenExperts"), ("gemma4-moe", "Gemma4TextExperts")]
)
def test_experts_that_a_checkpoint_holds_in_one_tensor_are_refused_on_more_ranks(
    architecture, experts
):
    config_class, sizes = ALL_ARCHITECTURES[architecture]
    config = config_class(**{**SIZES, **sizes})
    require(config, 1, 1)
    with pytest.raises(ConfigError, match=rf"experts of a layer in one tensor \({experts}\)"):
        require(config, 1, 2)
