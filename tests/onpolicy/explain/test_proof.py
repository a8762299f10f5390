"""The operator alone: what depends on the batch is told from an engine that computes otherwise."""

import pytest
import torch

from onpolicy.explain import proof
from onpolicy.explain.taps.evidence import Evidence, read_evidence, write_evidence
from onpolicy.ops import AttentionLayout, PagedLayout, ScoreRule
from onpolicy.ops.cpu import CpuOperators
from tests.support.faults import one_ulp_in_three_rows
from tests.support.violations import break_operator, next_up

ROW = torch.randn(1, 24)
WEIGHT = torch.randn(16, 24)
FEW, MANY = torch.cat([ROW, torch.randn(2, 24)]), torch.cat([torch.randn(40, 24), ROW])


def prove(rollout, train, *how):
    return proof.prove({0: rollout}, train, *how)


def linear(operators, x, row, weight=WEIGHT):
    args = (x, weight, None)
    return Evidence.of("linear", args, operators.linear(*args), [row], len(x))


def test_an_operator_that_depends_on_the_batch():
    broken = break_operator(CpuOperators(1), "linear")
    found = prove(linear(broken, FEW, 0), linear(broken, MANY, 40), broken)
    assert found.verdict == "depends on the batch"
    assert (found.in_rollout_shape, found.in_train_shape, found.same_in_both) == (True, True, False)
    assert (found.difference.different, found.difference.max_ulp) == (16, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_distance_is_counted_in_the_numbers_of_its_dtype(dtype):
    row = (ROW.abs() + 1).to(dtype)
    assert proof.difference([row], [next_up(next_up(row))]).max_ulp == 2


def test_an_engine_that_computes_something_else():
    right, broken = CpuOperators(1), break_operator(CpuOperators(1), "linear", lambda rows: True)
    wrong_rollout = prove(linear(broken, FEW, 0), linear(right, MANY, 40), right)
    wrong_trainer = prove(linear(right, FEW, 0), linear(broken, MANY, 40), right)
    assert (wrong_rollout.verdict, wrong_trainer.verdict) == ("rollout differs", "trainer differs")
    assert wrong_rollout.same_in_both and wrong_trainer.same_in_both


def test_weights_that_differ_are_told_before_anything_else():
    right = CpuOperators(1)
    found = prove(linear(right, FEW, 0, 1.001 * WEIGHT), linear(right, MANY, 40), right)
    assert found.verdict == "other weights"


def grouped(operators, of_experts):
    """The first expert's first row is the same; its other rows, and the second expert's, are not."""
    x = torch.cat([ROW, torch.randn(sum(of_experts) - 1, 24)])
    offsets = torch.tensor([0, *of_experts]).cumsum(0)
    weight = torch.stack([WEIGHT, 2 * WEIGHT])
    args = (x, weight, offsets)
    return Evidence.of("grouped_linear", args, operators.grouped_linear(*args), [0], len(x))


def test_experts_with_other_numbers_of_rows_hold_the_same_weights():
    right = CpuOperators(1)
    found = prove(grouped(right, [1, 3]), grouped(right, [5, 2]), right)
    assert found.verdict == "not reproduced" and found.same_in_both


def attention(operators, counts, sequence, k, paged=False, attend=None):
    """The last query of one sequence of a call; q and v are the same in every call."""
    generator = torch.Generator().manual_seed(1)
    q, v = (torch.randn(30, heads, 16, generator=generator) for heads in (4, 2))
    starts = torch.tensor([0, *counts]).cumsum(0)
    ends = [int(starts[sequence + 1])]
    if paged:
        layout = PagedLayout(
            page_table=torch.arange(counts[sequence])[None].int() + int(starts[sequence]),
            page_size=1,
            key_lens=torch.tensor([counts[sequence]]).int(),
            query_starts=torch.tensor([0, 1]).int(),
            max_query_len=1,
        )
        q, k, v, rows = q[ends[0] - 1 : ends[0]], k[:, None], v[:, None], 1
    else:
        layout, rows = AttentionLayout.packed(counts), sum(counts)
        q, k, v = q[:rows], k[:rows], v[:rows]
    name = "paged_attention" if paged else "attention"
    args = (q, k, v, layout, ScoreRule(0.25))
    out = (attend or getattr(operators, name))(*args)
    return Evidence.of(name, args, out, [0 if paged else ends[0] - 1], rows)


def test_attention_is_run_over_its_own_sequence(tmp_path):
    operators, k = CpuOperators(1), torch.randn(30, 2, 16)
    packed = attention(operators, (9, 12, 9), 1, k)
    write_evidence(attention(operators, (9, 12, 9), 1, k, paged=True), tmp_path)
    decoded = read_evidence(tmp_path)[0]
    assert (len(packed.arguments[0]), len(decoded.arguments[0])) == (12, 1)
    assert prove(decoded, packed, operators).verdict == "not reproduced"
    broken = one_ulp_in_three_rows(operators.paged_attention)
    wrong = attention(operators, (9, 12, 9), 1, k, paged=True, attend=broken)
    found = prove(wrong, packed, operators)
    assert (found.verdict, found.difference.different) == ("rollout differs", 3)
    stale = k.clone()
    stale[11] = stale[12]
    found = prove(attention(operators, (9, 12, 9), 1, stale, paged=True), packed, operators)
    assert found.verdict == "other keys"
