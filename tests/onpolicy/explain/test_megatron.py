"""Megatron's modules, broken one at a time and on one rank, are named as Hugging Face's are."""

import pytest

from onpolicy.contract import AdapterShape
from onpolicy.training.megatron.rank_layout import MegatronLayout
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


pytest.importorskip("megatron.core")

OF_RANKS = random_sequences([66, 9, 3, 12])
ROW_PARALLEL = sum(len(s) - 1 for s in OF_RANKS)
ALL, LAST_OF_RANKS = (0, 1), (1,)

COLUMNS = [
    ("self_attention.linear_qkv", "linear", "self_attn.q_proj", ALL),
    ("self_attention.k_layernorm", "rms_norm", "self_attn.k_norm", ALL),
    ("self_attention.core_attention", "rotary", "self_attn", ALL),
    ("self_attention.core_attention", "attention", "self_attn", ALL),
    ("self_attention.linear_proj", "row_parallel_linear", "self_attn.o_proj", LAST_OF_RANKS),
    ("mlp.linear_fc1", "linear", "mlp.gate_proj", ALL),
    ("mlp", "gated", "mlp", ALL),
]
"""Megatron's module of a layer and its operator, which is broken on the last rank; Hugging Face's module
that is to be named, and the tensor-parallel ranks of the trainer on which it is seen: all where they
share what it makes."""

COPIES = [("input_layernorm", "rms_norm", "input_layernorm", LAST_OF_RANKS)]
TOKENS = [("input_layernorm", "rms_norm", "input_layernorm", ALL)]
WHOLE_OF_RANKS = [(module, operator, name, (0,)) for module, operator, name, _ in COLUMNS + TOKENS]
SHARED_EXPERTS = [
    ("mlp.router", "linear", "mlp.gate", ALL),
    ("mlp.experts", "grouped_linear", "mlp.experts", ALL),
    ("mlp.experts", "gated", "mlp.experts", ALL),
    ("mlp.experts", "grouped_partial_linear", "mlp.experts", LAST_OF_RANKS),
]
OWN_EXPERTS = [(module, operator, name, (0,)) for module, operator, name, _ in SHARED_EXPERTS]

TENSOR, CONTEXT = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
EXPERT = {"expert_model_parallel_size": 2}
CASES = [
    ("tensor", "qwen3", TENSOR, COLUMNS + COPIES),
    ("tensor and sequence", "qwen3-moe", SEQUENCE, TOKENS + SHARED_EXPERTS),
    ("context", "qwen3", CONTEXT, WHOLE_OF_RANKS),
    ("expert", "qwen3-moe", EXPERT, OWN_EXPERTS),
    ("joined heads", "olmo2", TENSOR, [
        ("self_attention.q_layernorm", "rms_norm", "self_attn.q_norm", LAST_OF_RANKS),
    ]),
    ("shared expert", "glm4-moe", SEQUENCE, [
        ("mlp.shared_expert", "gated", "mlp.shared_experts", ALL),
    ]),
]  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.mark.runs
@pytest.mark.parametrize(
    ("architecture", "sizes", "sites"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_fault_of_the_last_rank_is_found_and_nothing_else_differs(
    two_ranks, tmp_path, architecture, sizes, sites
):
    layout = MegatronLayout(**sizes)
    spread = layout.expert_model_parallel_size
    job = Job(
        path=make_checkpoint(tmp_path / "model", architecture),
        batches=[OF_RANKS[i::spread] for i in range(spread)],
        blocks=layout.tensor_model_parallel_size,
        layout=layout,
    )
    cases = [
        (f"{LAYER}.{module}", operator, "one_ulp_everywhere") for module, operator, *_ in sites
    ]
    answers = two_ranks.run(sources_of_faults, job, cases)
    assert answers[0] == answers[1]
    whole, *found = answers[0]
    sources, rows, differ, only_in_one = whole
    assert (sources, differ, only_in_one) == ([], 0, set())
    assert max(rows) == ROW_PARALLEL
    names = [_common_name(operator, job.blocks) for _, operator, *_ in sites]
    assert found == [
        ("operator", f"layers.1.{module}", name, ranks, "trainer differs")
        for (*_, module, ranks), name in zip(sites, names, strict=True)
    ]


A, B, ADD = "row_parallel_linear", "linear", "add_scaled"
ADAPTED_RANKS = [
    (
        "self_attention.linear_qkv.lora.q_proj",
        A,
        ("self_attn.q_proj.lora", "linear", LAST_OF_RANKS),
    ),
    ("self_attention.linear_qkv.lora.k_proj", ADD, ("self_attn.k_proj.lora", "add_scaled", ALL)),
    ("mlp.linear_fc1.lora.up_proj", ADD, ("mlp.up_proj.lora", "add_scaled", ALL)),
]
OF_SUMS = ("mlp.linear_fc2.lora.down_proj", B)
"""Whose tokens each rank has, or under sequence parallelism its own."""


@pytest.mark.runs
@pytest.mark.parametrize(("sizes", "ranks"), [(TENSOR, LAST_OF_RANKS), (SEQUENCE, ALL)])
def test_what_ranks_share_of_an_adapter_is_put_together(two_ranks, tmp_path, sizes, ranks):
    targets = ("down_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj")
    job = Job(
        path=make_checkpoint(tmp_path / "model", "qwen3", tie_word_embeddings=False),
        batches=[OF_RANKS],
        blocks=2,
        layout=MegatronLayout(**sizes),
        adapter=AdapterShape(rank=4, scale=0.5, targets=targets),
    )
    sites = [*ADAPTED_RANKS, (*OF_SUMS, ("mlp.down_proj.lora", "linear", ranks))]
    cases = [(f"{LAYER}.{module}", operator, "one_ulp_everywhere") for module, operator, _ in sites]
    ((sources, rows, differ, only_in_one), *found), _ = two_ranks.run(sources_of_faults, job, cases)
    assert (sources, differ, only_in_one, max(rows)) == ([], 0, set(), ROW_PARALLEL)
    assert found == [
        ("operator", f"layers.1.{module}", name, where, "trainer differs")
        for *_, (module, name, where) in sites
    ]


@pytest.mark.runs
def test_tensor_context_and_expert_parallelism_at_once(tmp_path):
    """On four ranks, of which the last is broken."""
    sizes = {**SEQUENCE, **CONTEXT, **EXPERT}
    job = Job(
        path=make_checkpoint(tmp_path / "model", "qwen3-moe"),
        batches=[OF_RANKS],
        blocks=2,
        layout=MegatronLayout(**sizes),
    )
    cases = [(f"{LAYER}.mlp.experts", "grouped_linear", "one_ulp_everywhere")]
    ranks = Ranks(4)
    try:
        (whole, found), *_ = ranks.run(sources_of_faults, job, cases)
    finally:
        ranks.stop()
    sources, rows, differ, only_in_one = whole
    assert (sources, differ, only_in_one, max(rows)) == ([], 0, set(), ROW_PARALLEL)
    named = "layers.1.mlp.experts", "grouped_linear"
    assert found == ("operator", *named, ALL, "trainer differs")


def _common_name(operator, blocks):
    """What a linear is called whose sum nobody shares."""
    return "linear" if (operator, blocks) == ("row_parallel_linear", 1) else operator
