"""Megatron's modules, broken one at a time, are named as Hugging Face's are."""

import pytest

from onpolicy.contract import AdapterShape
from tests.onpolicy.models.test_policy import random_sequences
from tests.support.megatron_ranks import Job, Ranks, asked_for
from tests.support.recorded_megatron import sources_of_faults
from tests.support.tiny import make_checkpoint

pytest.importorskip("megatron.core")

SEQUENCES = random_sequences([66, 9, 3])
ROWS = sum(len(s) - 1 for s in SEQUENCES)
ROWS_OF_THE_HEAD = sum(sum(asked_for(s)) for s in SEQUENCES)

LAYER = "decoder.layers.1"
LINEARS = (
    "down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj",
)  # fmt: skip
ULP, LAST = "one_ulp_in_three_rows", "one_ulp_in_the_last_column"
DENSE = [
    ("input_layernorm", "rms_norm", ULP, "input_layernorm", "rms_norm"),
    # The three are in the queries; keys follow, and the last are values.
    ("self_attention.linear_qkv", "linear", ULP, "self_attn.q_proj", "linear"),
    ("self_attention.linear_qkv", "linear", LAST, "self_attn.v_proj", "linear"),
    ("self_attention.k_layernorm", "rms_norm", ULP, "self_attn.k_norm", "rms_norm"),
    ("self_attention.core_attention", "rotary", ULP, "self_attn", "rotary"),
    ("self_attention.core_attention", "attention", ULP, "self_attn", "attention"),
    ("self_attention.linear_proj", "row_parallel_linear", ULP, "self_attn.o_proj", "linear"),
    ("pre_mlp_layernorm", "rms_norm", ULP, "post_attention_layernorm", "rms_norm"),
    ("mlp.linear_fc1", "linear", LAST, "mlp.up_proj", "linear"),
    ("mlp", "gated", ULP, "mlp", "gated"),
    ("mlp.linear_fc2", "row_parallel_linear", ULP, "mlp.down_proj", "linear"),
]
EXPERTS = [
    ("mlp.router", "linear", ULP, "mlp.gate", "linear"),
    ("mlp.router", "softmax", ULP, "mlp.gate", "softmax"),
    ("mlp.router", "topk", "other_experts", "mlp.gate", "topk"),
    ("mlp.experts", "grouped_linear", LAST, "mlp.experts", "grouped_linear"),
    ("mlp.experts", "gated", ULP, "mlp.experts", "gated"),
    ("mlp.experts", "grouped_partial_linear", ULP, "mlp.experts", "grouped_partial_linear"),
]
ROUTER = [("mlp.router", "linear", ULP, "mlp.gate", "linear")]
"""Which a checkpoint of Mixtral calls block_sparse_moe.gate."""
NORMS_AFTER = [
    ("self_attention.k_layernorm", "rms_norm", ULP, "self_attn.k_norm", "rms_norm"),
    (
        "self_attention.linear_proj.post_layernorm", "rms_norm", ULP,
        "post_attention_layernorm", "rms_norm",
    ),
    (
        "mlp.linear_fc2.post_layernorm", "rms_norm", ULP,
        "post_feedforward_layernorm", "rms_norm",
    ),
]  # fmt: skip
WHOLE = [
    ("mlp.shared_expert.linear_fc1", "linear", LAST, "mlp.shared_expert.up_proj", "linear"),
    ("mlp.shared_expert", "gated", ULP, "mlp.shared_expert", "gated"),
    ("mlp.shared_gate", "linear", ULP, "mlp.shared_expert_gate", "linear"),
]
SHARED = [
    ("mlp.router", "linear", ULP, "mlp.gate", "linear"),
    ("mlp.shared_expert", "gated", ULP, "mlp.shared_experts", "gated"),
]
QKV, FC1 = "self_attention.linear_qkv.lora", "mlp.linear_fc1.lora"
ADAPTED = [
    (f"{QKV}.k_proj", "row_parallel_linear", ULP, "self_attn.k_proj.lora", "linear"),
    (f"{QKV}.v_proj", "add_scaled", LAST, "self_attn.v_proj.lora", "add_scaled"),
    (f"{FC1}.up_proj", "add_scaled", ULP, "mlp.up_proj.lora", "add_scaled"),
    ("mlp.linear_fc2.lora.down_proj", "row_parallel_linear", ULP, "mlp.down_proj.lora", "linear"),
]
ADAPTED_EXPERTS = [
    ("mlp.experts", "add_scaled", ULP, "mlp.experts", "add_scaled"),
    ("mlp.experts", "grouped_partial_linear", ULP, "mlp.experts", "grouped_partial_linear"),
]
"""Of a layer: Megatron's module, the operator, what is done to it; and what is to be named."""


@pytest.fixture(scope="module")
def alone():
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


def assert_faults_are_found(alone, job, sites):
    """Each where it is, nothing else differs, and without one nothing does."""
    cases = [(f"{LAYER}.{module}", operator, fault) for module, operator, fault, *_ in sites]
    ((whole, *found),) = alone.run(sources_of_faults, job, cases)
    sources, rows, differ, only_in_one = whole
    assert (sources, differ, only_in_one) == ([], 0, set())
    assert rows == {ROWS, ROWS_OF_THE_HEAD}
    assert found == [
        ("operator", f"layers.1.{module}", name, (0,), "trainer differs")
        for *_, module, name in sites
    ]


@pytest.mark.parametrize(
    ("architecture", "sites"), [
        ("qwen3", DENSE), ("olmo2", NORMS_AFTER), ("qwen3-moe", EXPERTS),
        ("mixtral", ROUTER), ("qwen2-moe", WHOLE), ("glm4-moe", SHARED),
    ],
)  # fmt: skip
def test_a_fault_is_found_where_it_is_and_nothing_else_differs(
    alone, tmp_path, architecture, sites
):
    job = Job(path=make_checkpoint(tmp_path / "model", architecture), batches=[SEQUENCES])
    assert_faults_are_found(alone, job, sites)


@pytest.mark.parametrize(
    ("architecture", "sites", "targets"), [
        ("qwen3", ADAPTED, LINEARS), ("qwen3-moe", ADAPTED_EXPERTS, ("experts",)),
    ],
)  # fmt: skip
def test_what_an_adapter_computes_is_a_site_of_the_linear_that_it_is_beside(
    alone, tmp_path, architecture, sites, targets
):
    adapter = AdapterShape(rank=4, scale=0.5, targets=targets)
    path = make_checkpoint(tmp_path / "model", architecture, tie_word_embeddings=False)
    job = Job(path=path, batches=[SEQUENCES], adapter=adapter)
    assert_faults_are_found(alone, job, sites)
