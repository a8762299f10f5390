"""Every architecture without a server: the trainer's packed pass against a decode loop.

Both run the same aligned Hugging Face model, as they do in the two engines. What only a server can show
(its own linears, embeddings and logits) is in tests/e2e/test_verify.py and docs/architectures.md.
"""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from onpolicy.errors import ConfigError
from onpolicy.models.align import replace_operators
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import require_alignable
from onpolicy.models.policy import PackedTokens
from onpolicy.models.shared_prefixes import share_prefixes
from onpolicy.ops.cpu import CpuOperators
from tests.onpolicy.models.test_policy import load_policy
from tests.support.architecture_table import CELLS, PAGE, page, read
from tests.support.decode_loop import decode_log_probs
from tests.support.tiny import ALL_ARCHITECTURES, REFUSED, make_checkpoint
from tests.support.violations import break_operator

pytestmark = pytest.mark.long

CONTEXT = 256
TEMPERATURE = 0.7
LENS = (113, 20, 9, 2)

CONTROLS = {
    "linear": "qwen3", "paged_attention": "qwen3", "rms_norm": "gemma", "layer_norm": "starcoder2",
    "elementwise": "starcoder2", "rotary": "qwen3", "gated": "qwen3", "log_softmax": "qwen3",
    "grouped_linear": "qwen3-moe", "softmax": "qwen3-moe", "causal_conv": "qwen3-next",
    "gated_delta": "qwen3-next",
}  # fmt: skip
"""Kinds of operators, and an architecture that calls each."""


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 137, (n,), generator=generator).tolist() for n in LENS]


def packed_log_probs(policy):
    return policy(PackedTokens.after_prompts(sequences(), [1] * len(LENS), TEMPERATURE))[0]


def require_shared_prefixes_change_no_bit(policy):
    """A group of one prompt, one of whose responses goes on, and a branch of that."""
    (long, *_, last) = sequences()
    group = [long[:70] + tail for tail in (last, long[80:], [5, 6, 7], [5, 6, 9, 8], [])]
    apart = PackedTokens.after_prompts(group, [60] * len(group), TEMPERATURE)
    shared = share_prefixes(apart)
    assert len(shared.tokens) < len(apart.tokens) / 3
    with torch.no_grad():
        assert torch.equal(policy(shared)[0], policy(apart)[0])


def both(policy, operators=None):
    """The trainer's log-probabilities and the decode loop's."""
    with torch.no_grad():
        packed = packed_log_probs(policy)
    replace_operators(policy, operators or policy.operators)
    decoded = decode_log_probs(
        policy, operators or policy.operators, sequences(), temperature=TEMPERATURE
    )
    return packed, torch.cat(decoded)


def take_a_step(policy):
    """Every weight against its gradient, by up to a tenth of its own size."""
    packed_log_probs(policy).sum().backward()
    for weight in policy.parameters():
        if weight.grad is not None:
            step = weight.grad / weight.grad.abs().max().clamp(min=1e-20)
            weight.data -= 0.1 * weight.data.abs().mean() * step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", [a for a in ALL_ARCHITECTURES if a not in REFUSED])
def test_training_and_decoding_agree_before_and_after_a_step(architecture, dtype, tmp_path):
    path = make_checkpoint(tmp_path, architecture)
    require_alignable(ModelFacts(AutoConfig.from_pretrained(path)), CONTEXT)
    policy = load_policy(path, dtype=dtype)
    packed, decoded = both(policy)
    assert packed.isfinite().all() and torch.equal(packed, decoded)
    take_a_step(policy)
    after, decoded = both(policy)
    assert after.isfinite().all() and torch.equal(after, decoded)
    assert not torch.equal(after, packed)
    require_shared_prefixes_change_no_bit(policy)


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_has_no_aligned_operators_is_refused_by_name(architecture, tmp_path):
    path = make_checkpoint(tmp_path, architecture)
    with pytest.raises(ConfigError, match=REFUSED[architecture]):
        require_alignable(ModelFacts(AutoConfig.from_pretrained(path)), CONTEXT)


@pytest.mark.parametrize(("operator", "architecture"), CONTROLS.items())
def test_an_operator_that_depends_on_the_batch_is_found(operator, architecture, tmp_path):
    broken = break_operator(CpuOperators(1), operator)
    packed, decoded = both(load_policy(make_checkpoint(tmp_path, architecture)), broken)
    assert not torch.equal(packed, decoded)


def engine_with(change):
    """Operators whose attention over pages is asked for something else."""
    operators = CpuOperators(1)
    paged_attention = operators.paged_attention
    operators.paged_attention = lambda q, k, v, layout, scores: paged_attention(
        q, k, v, layout, replace(scores, **change)
    )
    return operators


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("mistral-window", {"window": 25}),
        ("gemma2", {"softcap": None}),
        ("gpt-oss", {"sinks": None}),
    ],
    ids=["a window longer by one key", "no soft cap", "no sinks"],
)
def test_an_engine_that_scores_keys_in_another_way_is_found(architecture, change, tmp_path):
    policy = load_policy(make_checkpoint(tmp_path, architecture))
    packed, decoded = both(policy, engine_with(change))
    assert not torch.equal(packed, decoded)


def test_the_page_is_what_the_record_renders():
    assert PAGE.read_text() == page(read())


def test_every_cell_of_the_page_was_run_and_no_other_is_in_the_record():
    written = {(architecture, column) for architecture, cells in read().items() for column in cells}
    assert written == set(CELLS)


OPEN: set[tuple[str, str]] = set()
"""Faults of the record, all of them."""


def test_no_token_of_the_record_differs_but_where_a_fault_is_open():
    faults = {
        (architecture, column)
        for architecture, cells in read().items()
        for column, cell in cells.items()
        if cell.get("mismatched", 0) or "failed" in cell
    }
    assert faults == OPEN


def test_what_differs_or_fails_is_shown_as_such():
    shown = page({"qwen3": {
        "float32": {"compared": 144, "mismatched": 3}, "bfloat16": {"failed": "why"},
        "Megatron": {"refused": "because"},
    }})  # fmt: skip
    assert "| Qwen3 (`qwen3`) | **3 of 144** | **fails** | not run | refused |" in shown
    assert "- `qwen3` in Megatron: because" in shown
