"""A rollout on two tensor-parallel ranks, one of them broken in one module, against a whole trainer."""

import pytest
import torch
import torch.distributed as dist

from onpolicy.explain.megatron import ADDED, OverTensorRanks
from onpolicy.explain.proof import prove
from onpolicy.explain.source import count_sites, first_source
from onpolicy.explain.taps.recorder import CHOSEN_EXPERTS, HEAD, Recorder
from onpolicy.explain.taps.row_keys import prefix_keys
from onpolicy.ops.cpu import CpuOperators
from onpolicy.training import distributed
from tests.onpolicy.models.test_policy import random_sequences
from tests.support import faults
from tests.support.recorded_policies import record_trainer, replace_in
from tests.support.sharded_policies import RANKS, load_in_blocks, record_ranks
from tests.support.tiny import make_checkpoint

pytestmark = pytest.mark.long

SEQUENCES = random_sequences([66, 9, 3])
ROWS = sum(len(sequence) - 1 for sequence in SEQUENCES)
BROKEN = 1

DENSE = [
    ("layers.0.input_layernorm", "rms_norm"),  # whole on every rank
    ("layers.1.self_attn.k_proj", "row_parallel_linear"),  # its columns are shared
    ("layers.1.self_attn.q_norm", "rms_norm"),  # heads
    ("layers.1.self_attn", "rotary"),
    ("layers.0.self_attn.o_proj", "row_parallel_linear"),  # summed over ranks
    ("layers.0.mlp", "gated"),
]
EXPERTS = [
    ("layers.1.mlp.gate", "topk"),
    ("layers.1.mlp.experts", "grouped_linear"),  # gate and up side by side
    ("layers.0.mlp.experts", "gated"),
    ("layers.1.mlp.experts", "grouped_partial_linear"),  # a block of the sum on each rank
]


class Engines:
    """A rollout on two ranks and a trainer; what is whole is recorded once."""

    def __init__(self, path):
        self.path = path
        self.rollout = record_ranks(path, SEQUENCES)
        self.train = self.record_trainer(Recorder())

    def record_trainer(self, recorder):
        recorder.shares, recorder.ranks = self.rollout.shares(), self.rollout.ranks
        return record_trainer(load_in_blocks(self.path), SEQUENCES, recorder)

    def source(self, **how):
        """Where a broken rollout and the trainer part."""
        rollout = record_ranks(self.path, SEQUENCES, **how)
        assert rollout.shares() == self.rollout.shares()
        sources = [first_source(rollout, [self.train], prefix_keys(s)[:-1]) for s in SEQUENCES]
        return next((source for source in sources if source is not None), None)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    names = ("qwen3", "qwen3-moe")
    return {name: Engines(make_checkpoint(directory / name, name)) for name in names}


def found(source):
    return source.cause, *source.site[:2], source.ranks


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-moe"])
def test_between_whole_sides_nothing_differs_and_all_is_compared(engines, architecture):
    pair = engines[architecture]
    counts = list(count_sites(pair.rollout, [pair.train]))
    assert [c.site for c in counts] == list(pair.train) and set(pair.train) == set(pair.rollout)
    assert all(c.inputs_differ == c.outputs_differ == 0 for c in counts)
    assert {c.rows for c in counts} == {ROWS}
    for site, by_rank in pair.train.items():
        is_block = site[1] == "grouped_partial_linear"
        assert list(by_rank) == ([site[2]] if is_block else [*range(RANKS)])


SITES = [("qwen3", DENSE), ("qwen3-moe", EXPERTS)]
CASES = [
    pytest.param(architecture, *site, id="-".join(site)) for architecture, s in SITES for site in s
]


@pytest.mark.parametrize(("architecture", "module", "operator"), CASES)
def test_an_operator_broken_on_one_rank_is_found(
    engines, monkeypatch, architecture, module, operator
):
    holder = module.removesuffix(".gate") if architecture == "qwen3-moe" else module

    def break_(rank, policy):
        if rank == BROKEN:
            replace_in(monkeypatch, policy, holder, operator, faults.one_ulp_in_three_rows)
        return CpuOperators(1)

    name = "linear" if module.endswith("k_proj") else operator
    source = engines[architecture].source(break_=break_)
    assert found(source) == ("operator", module, name, (BROKEN,))


@pytest.mark.parametrize(
    ("operator", "module"), [("paged_attention", "layers.0.self_attn"), ("linear", HEAD)]
)
def test_broken_attention_and_a_broken_head_are_found(engines, operator, module):
    def break_(rank, policy):
        operators = CpuOperators(1)
        if rank == BROKEN:
            setattr(operators, operator, faults.one_ulp_in_three_rows(getattr(operators, operator)))
        return operators

    source = engines["qwen3"].source(break_=break_)
    assert found(source) == ("operator", module, operator.removeprefix("paged_"), (BROKEN,))


def test_a_stale_key_in_one_ranks_cache_is_found(engines):
    passes = iter(range(10**6))

    def spoil(rank, spans, store):
        if rank == BROKEN and next(passes) == 3:
            k, _ = store.layers[1]
            k[store.pages[0][7]] = k[store.pages[0][8]].clone()

    source = engines["qwen3"].source(on_pass=spoil)
    assert found(source) == ("key/value cache", "layers.1.self_attn", "attention", (BROKEN,))


def test_a_part_of_a_sum_shows_on_all_ranks(engines):
    """What rank 1 adds is wrong, so both get a wrong sum."""

    def break_(rank, policy):
        if rank == BROKEN:
            with torch.no_grad():
                weight = policy.causal_lm.base_model.layers[1].mlp.down_proj.weight
                weight.mul_(1.001)
        return CpuOperators(1)

    source = engines["qwen3"].source(break_=break_)
    assert found(source) == ("operator", "layers.1.mlp.down_proj", "row_parallel_linear", (0, 1))


def proven(pair, site, rank, break_=lambda rank, policy: CpuOperators(1)):
    key = prefix_keys(SEQUENCES[0])[40]
    recorders = [Recorder(rank) for rank in range(RANKS)]
    for recorder in recorders:
        recorder.suspect = site, key, recorder.rank
    record_ranks(pair.path, SEQUENCES, break_, recorders=recorders)
    ours = Recorder()
    ours.suspect = site, key, rank
    pair.record_trainer(ours)
    theirs = {r.rank: r.evidence for r in recorders if r.evidence is not None}
    return prove(theirs, ours.evidence, CpuOperators(1), rank)


@pytest.mark.parametrize(
    ("architecture", "module", "operator"),
    [
        ("qwen3", "layers.1.self_attn.k_proj", "linear"),
        ("qwen3", "layers.1.self_attn.q_norm", "rms_norm"),
        ("qwen3", "layers.0.self_attn", "rotary"),
        ("qwen3", "layers.1.self_attn", "attention"),
        ("qwen3", "layers.1.self_attn.o_proj", "row_parallel_linear"),
        ("qwen3", "layers.1.mlp", "gated"),
        ("qwen3", HEAD, "linear"),
        ("qwen3-moe", "layers.1.mlp.experts", "grouped_linear"),
        ("qwen3-moe", "layers.1.mlp.experts", "grouped_partial_linear"),
    ],
)
def test_alone_an_operator_gives_both_sides_bits(engines, architecture, module, operator):
    site = module, operator, int(operator == "grouped_partial_linear")
    proof = proven(engines[architecture], site, rank=1)
    answers = proof.in_rollout_shape, proof.in_train_shape, proof.same_in_both
    assert answers == (True, True, True)
    assert (proof.verdict, proof.difference.different) == ("not reproduced", 0)


@pytest.mark.parametrize(
    ("architecture", "module", "operator", "weight"),
    [
        ("qwen3", "layers.1.self_attn.k_proj", "linear", "weight"),
        ("qwen3", "layers.1.self_attn.o_proj", "row_parallel_linear", "weight"),
        ("qwen3-moe", "layers.1.mlp.experts", "grouped_linear", "gate_up_proj"),
    ],
)
def test_a_ranks_part_of_a_weight_that_was_not_pushed_is_proven(
    engines, architecture, module, operator, weight
):
    def break_(rank, policy):
        if rank == BROKEN:
            with torch.no_grad():
                getattr(policy.causal_lm.base_model.get_submodule(module), weight).mul_(1.01)
        return CpuOperators(1)

    proof = proven(engines[architecture], (module, operator, 0), BROKEN, break_)
    assert proof.verdict == "other weights" and proof.difference.different > 0


def test_choices_of_experts_are_compared_on_every_rank(engines):
    train = engines["qwen3-moe"].train
    assert [*train["layers.1.mlp.gate", CHOSEN_EXPERTS, 0]] == [0, 1]


VOCABULARY, PADDED = 5, 8


@pytest.fixture
def head():
    distributed.init_process_group()
    return OverTensorRanks(ADDED, dist.group.WORLD, columns=VOCABULARY)


def test_nothing_of_the_padding_of_a_vocabulary_is_left(head):
    """Not in logits, nor in what an adapter adds to them, nor in what is held for either."""
    hidden, logits = torch.randn(1, 3, 4), torch.randn(1, 3, PADDED)
    weight, bias = torch.randn(PADDED, 4), torch.randn(PADDED)
    assert torch.equal(head.given("linear", (hidden, weight))[0], hidden)
    assert torch.equal(head.made("linear", logits), logits[..., :VOCABULARY])
    _, *held = head.held("linear", (hidden, weight, bias))
    assert [len(each) for each in held] == [VOCABULARY, VOCABULARY]
    added = (logits, logits + 1, 0.5)
    given = head.given("add_scaled", added)
    assert all(torch.equal(a, b[..., :VOCABULARY]) for a, b in zip(given[:2], added, strict=False))
    assert torch.equal(head.made("add_scaled", logits), logits[..., :VOCABULARY])
