"""Each operator of the aligned set, broken in one module of one side, is named: it and no other.

The trainer packs; the rollout reads prompts in chunks and decodes over pages, as in
tests/support/decode_loop.py.
"""

from dataclasses import asdict, replace

import pytest
import torch

from onpolicy.contract import AdapterShape
from onpolicy.explain.source import count_sites, first_source
from onpolicy.explain.taps.recorder import CHOSEN_EXPERTS, HEAD_ADAPTER, Recording
from onpolicy.explain.taps.row_keys import prefix_keys
from onpolicy.models.lora.adapters import adapters, add_adapters
from onpolicy.ops.cpu import CpuOperators
from tests.onpolicy.models.test_policy import load_policy, random_sequences
from tests.support import faults
from tests.support.recorded_policies import record_rollout, record_trainer, replace_in
from tests.support.tiny import make_checkpoint

pytestmark = pytest.mark.long

SEQUENCES = random_sequences([66, 9, 3])
SIDES = ("trainer", "rollout")

DENSE = [
    ("layers.0.input_layernorm", "rms_norm"), ("layers.1.self_attn.q_norm", "rms_norm"),
    ("layers.1.self_attn.k_proj", "row_parallel_linear"),
    ("layers.0.self_attn.o_proj", "row_parallel_linear"),
    ("layers.1.mlp.down_proj", "row_parallel_linear"), ("layers.1.self_attn", "rotary"),
    ("layers.0.mlp", "gated"), ("norm", "rms_norm"),
]  # fmt: skip
EXPERTS = [
    ("layers.1.mlp.gate", "linear"), ("layers.0.mlp.gate", "softmax"),
    ("layers.1.mlp.gate", "topk"), ("layers.1.mlp.experts", "grouped_linear"),
    ("layers.0.mlp.experts", "gated"), ("layers.1.mlp.experts", "grouped_partial_linear"),
]  # fmt: skip
RECURRENT = [
    ("layers.0.linear_attn.in_proj_ba", "row_parallel_linear"),
    ("layers.0.linear_attn", "rms_norm"),
]
ADAPTED = [
    ("layers.1.mlp.down_proj.lora", "row_parallel_linear"),
    ("layers.0.self_attn.q_proj.lora", "linear"),
    ("layers.1.self_attn.k_proj.lora", "add_scaled"),
]

LORA = AdapterShape(
    rank=4, scale=0.3, targets=("down_proj", "k_proj", "lm_head", "q_proj", "up_proj")
)


class Pair:
    """A trainer's and a rollout's policy, one of which a test breaks; the other is recorded once."""

    def __init__(self, path, adapter=None):
        self.path, self.adapter, self.whole = path, adapter, {}
        self.renew()

    def renew(self):
        self.policies = {side: load_policy(self.path) for side in SIDES}
        for policy in self.policies.values():
            add_adapters(policy.causal_lm, policy.operators, self.adapter)
            torch.manual_seed(0)
            for adapter in adapters(policy.causal_lm):
                for held in adapter.state_dict().values():
                    held.uniform_(0.5, 1)
        self.operators = CpuOperators(1)

    def record(self, side, on_pass=lambda spans, store: None):
        policy = self.policies[side]
        if side == "trainer":
            return record_trainer(policy, SEQUENCES)
        return record_rollout(policy, self.operators, SEQUENCES, on_pass=on_pass)

    def source(self, broken=None, **how):
        """Where the recordings of the first sequence part that part at all."""
        recordings = {
            side: self.record(side, **how) if side == broken else self.whole_recording(side)
            for side in SIDES
        }
        rollout, train = recordings["rollout"], recordings["trainer"]
        sources = [first_source(rollout, [train], prefix_keys(s)[:-1]) for s in SEQUENCES]
        if not any(sources):
            counts = list(count_sites(rollout, [train]))
            assert all(c.inputs_differ == c.outputs_differ == 0 < c.rows for c in counts)
        return next((source for source in sources if source is not None), None)

    def whole_recording(self, side):
        if side not in self.whole:
            clean = Pair(self.path, self.adapter)
            self.whole[side] = clean.record(side)
        return self.whole[side]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    names = ("qwen3", "qwen3-moe", "olmo", "qwen3-next")
    pairs = {name: Pair(make_checkpoint(directory / name, name)) for name in names}
    return {**pairs, "adapters": Pair(directory / "qwen3", LORA)}


@pytest.fixture
def pair(pairs):
    """A dense pair of its own."""
    pairs["qwen3"].renew()
    yield pairs["qwen3"]
    pairs["qwen3"].renew()


def found(source):
    return source.cause, *source.site[:2]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-moe", "olmo", "qwen3-next", "adapters"])
def test_between_whole_sides_nothing_differs(pairs, architecture):
    assert pairs[architecture].source() is None


def test_a_head_that_computes_in_chunks_has_an_adapter_of_the_same_rows(pairs, monkeypatch):
    monkeypatch.setattr(CpuOperators, "rows_per_chunk", lambda *_: 7)
    rollout, train = (Pair(pairs["adapters"].path, LORA).record(side) for side in reversed(SIDES))
    counts = {c.site: c for c in count_sites(rollout, [train])}
    assert set(counts) == set(train) == set(rollout)
    assert all(c.inputs_differ == c.outputs_differ == 0 for c in counts.values())
    rows = counts["lm_head", "linear", 0].rows
    adapter = (("linear", 0), ("linear", 1), ("add_scaled", 0))
    assert {counts[HEAD_ADAPTER, *call].rows for call in adapter} == {rows}


@pytest.mark.parametrize(
    ("module", "cause"), [("lm_head", None), (HEAD_ADAPTER, None), ("norm", "not computed")]
)
def test_the_head_alone_may_lack_rows_of_the_rollout(pairs, module, cause):
    """An engine makes no logits of a prompt's tokens."""
    pair, passes = Pair(pairs["adapters"].path, LORA), []
    record_rollout(pair.policies["rollout"], pair.operators, SEQUENCES, passes=passes)

    def last(call):
        kept = ("keys", "inputs", "outputs")
        return replace(call, **{name: getattr(call, name)[-1:] for name in kept})

    fewer = [[last(c) if c.site[0] == module else c for c in calls] for calls in passes]
    train = pairs["adapters"].whole_recording("trainer")
    source = first_source(Recording.of(fewer), [train], prefix_keys(SEQUENCES[0])[:-1])
    assert (source and source.cause) == cause


def faults_of(operator):
    found = [faults.one_ulp_in_three_rows]
    if operator not in ("topk", "softmax"):
        found.append(faults.rounded_in_between)
    if "row_parallel" in operator:
        found.append(faults.summed_in_other_blocks)
    if operator == "rms_norm":
        found.append(faults.summed_backwards)
    if operator == "topk":
        found.append(faults.other_experts)
    return found


SITES = [
    ("qwen3", DENSE), ("qwen3-moe", EXPERTS), ("olmo", [("norm", "layer_norm")]),
    ("qwen3-next", RECURRENT), ("adapters", ADAPTED),
]  # fmt: skip
CASES = [
    pytest.param(*case, fault, side, id="-".join([*case[1:], fault.__name__, side]))
    for case in [(architecture, *site) for architecture, sites in SITES for site in sites]
    for fault in faults_of(case[-1])
    for side in SIDES
]


@pytest.mark.parametrize(("architecture", "module", "operator", "fault", "side"), CASES)
def test_a_fault_is_found_where_it_is(
    pairs, monkeypatch, architecture, module, operator, fault, side
):
    pair = pairs[architecture]
    # A router calls by the operators of the block around it.
    holder = module.removesuffix(".gate") if architecture == "qwen3-moe" else module
    replace_in(monkeypatch, pair.policies[side], holder, operator, fault)
    name = "linear" if operator == "row_parallel_linear" else operator
    assert found(pair.source(side)) == ("operator", module, name)


def test_a_router_that_chooses_otherwise_is_told_from_one_that_weighs_otherwise(pairs, monkeypatch):
    pair, site = pairs["qwen3-moe"], ("layers.1.mlp.gate", CHOSEN_EXPERTS, 0)
    flips = []
    for fault in (faults.one_ulp_in_three_rows, faults.other_experts):
        with monkeypatch.context() as broken:
            replace_in(broken, pair.policies["trainer"], "layers.1.mlp", "topk", fault)
            train = pair.record("trainer")
        counts = {c.site: asdict(c) for c in count_sites(pair.whole_recording("rollout"), [train])}
        flips.append(counts[site]["outputs_differ"])
        assert counts["layers.1.mlp.gate", "topk", 0]["own"] > 0
    assert flips == [0, 1]


def of_one_layer(right, layer, fault):
    """Attention is one function for all of the model's two layers, which call it in turn."""
    calls, broken = iter(range(10**6)), fault(right)
    return lambda *args: (broken if next(calls) % 2 == layer else right)(*args)


@pytest.mark.parametrize("fault", [faults.one_ulp_in_three_rows, faults.rounded_in_between])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("side", "name"), [("trainer", "attention"), ("rollout", "paged_attention")]
)
def test_broken_attention_is_found(pair, side, name, layer, fault):
    operators = CpuOperators(1)
    setattr(operators, name, of_one_layer(getattr(operators, name), layer, fault))
    pair.operators = pair.policies["trainer"].operators = operators
    assert found(pair.source(side)) == ("operator", f"layers.{layer}.self_attn", "attention")


@pytest.mark.parametrize("layer", [0, 1])
def test_a_stale_key_in_the_cache_is_found(pair, layer):
    passes = iter(range(10**6))

    def spoil(spans, store):
        if next(passes) == 3:
            k, _ = store.layers[layer]
            k[store.pages[0][7]] = k[store.pages[0][8]].clone()

    source = pair.source("rollout", on_pass=spoil)
    assert found(source) == ("key/value cache", f"layers.{layer}.self_attn", "attention")


@pytest.mark.parametrize("side", SIDES)
def test_the_head_is_found(pair, side):
    operators = CpuOperators(1)
    operators.linear = faults.one_ulp_in_three_rows(operators.linear)
    pair.operators = pair.policies["trainer"].operators = operators
    assert found(pair.source(side)) == ("operator", "lm_head", "linear")


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("weight", "site"),
    [
        ("layers.1.mlp.up_proj.weight", ("layers.1.mlp.up_proj", "linear")),
        ("embed_tokens.weight", ("embed_tokens", "embedding")),
        ("layers.0.self_attn.k_norm.weight", ("layers.0.self_attn.k_norm", "rms_norm")),
    ],
)
def test_a_weight_that_was_not_pushed_is_found(pair, side, weight, site):
    with torch.no_grad():
        pair.policies[side].causal_lm.base_model.get_parameter(weight).mul_(1.001)
    assert found(pair.source(side)) == ("operator", *site)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("module", ["layers.1.mlp.up_proj.lora", HEAD_ADAPTER])
@pytest.mark.parametrize(
    ("held", "operator", "number"),
    [("A", "linear", 0), ("B", "linear", 1)],
)
def test_what_was_not_pushed_of_an_adapter_is_found(pairs, side, module, held, operator, number):
    pair = pairs["adapters"]
    pair.renew()
    modules = pair.policies[side].causal_lm.named_modules()
    (adapter,) = (found for name, found in modules if name.endswith(module))
    adapter.state_dict()[held].mul_(1.001)
    source = pair.source(side)
    pair.renew()
    assert source.cause == "operator" and source.site == (module, operator, number)


def test_what_happens_between_operators_is_found(pair):
    """A residual that one side adds in another way."""
    layer = pair.policies["rollout"].causal_lm.base_model.layers[0]
    layer.register_forward_hook(lambda _, args, out: faults.next_up(out))
    source = pair.source("rollout")
    assert found(source) == ("between operators", "layers.1.input_layernorm", "rms_norm")
    assert source.before[:2] == ("layers.0.mlp.down_proj", "linear")


def test_a_row_that_was_never_computed_under_its_prefix_is_found(pair):
    """As if an engine had read another prompt's prefix from its cache."""
    others = [[5, *SEQUENCES[0][1:]], *SEQUENCES[1:]]
    rollout = record_rollout(pair.policies["rollout"], pair.operators, others)
    train = pair.whole_recording("trainer")
    source = first_source(rollout, [train], prefix_keys(SEQUENCES[0])[:-1])
    assert (source.cause, source.position) == ("not computed", 0)
