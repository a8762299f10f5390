"""Megatron's ranks share columns, heads, tokens and experts; what one of them breaks is named."""

import pytest

from onpolicy.contract import AdapterShape
from onpolicy.train.megatron.layout import MegatronLayout
from tests.onpolicy.models.test_policy import random_sequences
from tests.support.megatron_ranks import Job, Ranks
from tests.support.recorded_megatron import sources_of_faults
from tests.support.tiny import make_checkpoint

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.runs

SEQUENCES = random_sequences([66, 9, 3, 12])
ROWS = sum(len(s) - 1 for s in SEQUENCES)
LAYER = "decoder.layers.1"
ALL, LAST = (0, 1), (1,)

COLUMNS = [
    ("self_attention.linear_qkv", "linear", "self_attn.q_proj", ALL),
    ("self_attention.k_layernorm", "rms_norm", "self_attn.k_norm", ALL),
    ("self_attention.core_attention", "rotary", "self_attn", ALL),
    ("self_attention.core_attention", "attention", "self_attn", ALL),
    ("self_attention.linear_proj", "row_parallel_linear", "self_attn.o_proj", LAST),
    ("mlp.linear_fc1", "linear", "mlp.gate_proj", ALL),
    ("mlp", "gated", "mlp", ALL),
]
"""Megatron's module of a layer and its operator, which is broken on the last rank; Hugging Face's module
that is to be named, and the tensor-parallel ranks of the trainer on which it is seen: all where they
share what it makes."""

COPIES = [("input_layernorm", "rms_norm", "input_layernorm", LAST)]
TOKENS = [("input_layernorm", "rms_norm", "input_layernorm", ALL)]
WHOLE = [(module, operator, name, (0,)) for module, operator, name, _ in COLUMNS + TOKENS]
EXPERTS = [
    ("mlp.router", "linear", "mlp.gate", ALL),
    ("mlp.experts", "grouped_linear", "mlp.experts", ALL),
    ("mlp.experts", "gated", "mlp.experts", ALL),
    ("mlp.experts", "grouped_partial_linear", "mlp.experts", LAST),
]
OWN_EXPERTS = [(module, operator, name, (0,)) for module, operator, name, _ in EXPERTS]

TENSOR, CONTEXT = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
EXPERT = {"expert_model_parallel_size": 2}
GATHERED = {**EXPERT, "moe_token_dispatcher_type": "allgather"}
CASES = [
    ("tensor", "qwen3", TENSOR, COLUMNS + COPIES),
    ("tensor and sequence", "qwen3-moe", SEQUENCE, TOKENS + EXPERTS),
    ("context", "qwen3", CONTEXT, WHOLE),
    ("expert", "qwen3-moe", EXPERT, OWN_EXPERTS),
    ("expert, gathered", "qwen3-moe", GATHERED, OWN_EXPERTS),
    ("joined heads", "olmo2", TENSOR, [
        ("self_attention.q_layernorm", "rms_norm", "self_attn.q_norm", LAST),
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
        batches=[SEQUENCES[i::spread] for i in range(spread)],
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
    assert max(rows) == ROWS
    names = [_common_name(operator, job.blocks) for _, operator, *_ in sites]
    assert found == [
        ("operator", f"layers.1.{module}", name, ranks, "trainer differs")
        for (*_, module, ranks), name in zip(sites, names, strict=True)
    ]


A, B, ADD = "row_parallel_linear", "linear", "add_scaled"
ADAPTED = [
    ("self_attention.linear_qkv.lora.q_proj", A, ("self_attn.q_proj.lora", "linear", LAST)),
    ("self_attention.linear_qkv.lora.k_proj", ADD, ("self_attn.k_proj.lora", "add_scaled", ALL)),
    ("mlp.linear_fc1.lora.up_proj", ADD, ("mlp.up_proj.lora", "add_scaled", ALL)),
]
OF_SUMS = ("mlp.linear_fc2.lora.down_proj", B)
"""Whose tokens each rank has, or under sequence parallelism its own."""


@pytest.mark.parametrize(("sizes", "ranks"), [(TENSOR, LAST), (SEQUENCE, ALL)])
def test_what_ranks_share_of_an_adapter_is_put_together(two_ranks, tmp_path, sizes, ranks):
    targets = ("down_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj")
    job = Job(
        path=make_checkpoint(tmp_path / "model", "qwen3", tie_word_embeddings=False),
        batches=[SEQUENCES],
        blocks=2,
        layout=MegatronLayout(**sizes),
        adapter=AdapterShape(rank=4, scale=0.5, targets=targets),
    )
    sites = [*ADAPTED, (*OF_SUMS, ("mlp.down_proj.lora", "linear", ranks))]
    cases = [(f"{LAYER}.{module}", operator, "one_ulp_everywhere") for module, operator, _ in sites]
    ((sources, rows, differ, only_in_one), *found), _ = two_ranks.run(sources_of_faults, job, cases)
    assert (sources, differ, only_in_one, max(rows)) == ([], 0, set(), ROWS)
    assert found == [
        ("operator", f"layers.1.{module}", name, where, "trainer differs")
        for *_, (module, name, where) in sites
    ]


def test_tensor_context_and_expert_parallelism_at_once(tmp_path):
    """On four ranks, of which the last is broken."""
    sizes = {**SEQUENCE, **CONTEXT, **EXPERT}
    job = Job(
        path=make_checkpoint(tmp_path / "model", "qwen3-moe"),
        batches=[SEQUENCES],
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
    assert (sources, differ, only_in_one, max(rows)) == ([], 0, set(), ROWS)
    named = "layers.1.mlp.experts", "grouped_linear"
    assert found == ("operator", *named, ALL, "trainer differs")


def _common_name(operator, blocks):
    """What a linear is called whose sum nobody shares."""
    return "linear" if (operator, blocks) == ("row_parallel_linear", 1) else operator
