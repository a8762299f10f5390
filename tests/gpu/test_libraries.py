"""Every kernel library loads and launches on this machine; after this, failures are about bits."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F

from onpolicy.ops import AttentionLayout, PagedLayout, ScoreRule
from onpolicy.ops.row_parallel import RowParallel
from tests.gpu.attention_checks import PagedSequences
from tests.support.gpu.paged_attention import paged_attention_of

HEAD_DIM = 128


def _decoding(device):
    starts = torch.arange(6, dtype=torch.int32, device=device)
    return PagedLayout(
        page_table=starts[:5, None].clone(),
        page_size=1,
        key_lens=torch.ones_like(starts[:5]),
        query_starts=starts,
        max_query_len=1,
    )


def test_every_operator_launches(operators, numbers, setting, tally):
    x, weight, bias = numbers(5, 64), numbers(48, 64, seed=1), numbers(48, seed=2)
    device = setting.device
    experts, offsets = numbers(4, 48, 64, seed=3), torch.tensor([0, 2, 2, 5, 5], device=device)
    heads = [numbers(5, 2, HEAD_DIM, seed=s) for s in (4, 5, 6)]
    layout = AttentionLayout.packed((2, 3), device)
    t, targets = torch.ones(5, 1, device=device), torch.arange(5, device=device)
    q, k = (x.transpose(0, 1)[None] for x in heads[:2])
    log_probs = operators.log_softmax(x, t)
    results = {
        "linear": operators.linear(x, weight, bias),
        "partial_linear": operators.partial_linear(x, weight),
        "row_parallel_linear": operators.row_parallel_linear(x, weight, bias, RowParallel(4)),
        "grouped_linear": operators.grouped_linear(x, experts, offsets),
        "grouped_partial_linear": operators.grouped_partial_linear(x, experts, offsets),
        "attention": operators.attention(*heads, layout, ScoreRule(HEAD_DIM**-0.5)),
        "paged_attention": operators.paged_attention(
            heads[0],
            heads[1][:, None],
            heads[2][:, None],
            _decoding(device),
            ScoreRule(HEAD_DIM**-0.5),
        ),
        "rms_norm": operators.rms_norm(x, numbers(64), 1e-6),
        "elementwise": operators.elementwise(F.silu, x),
        "gated": operators.gated(F.silu, x, x),
        "rotary": operators.rotary(q, k, *2 * [numbers(1, 5, HEAD_DIM)])[0],
        "softmax": operators.softmax(x),
        "topk": operators.topk(operators.softmax(x), 4)[0],
        "log_softmax": log_probs,
        "gather_log_probs": operators.gather_log_probs(x, t, targets)[0],
        "grad_logits": operators.grad_logits(x, t, targets, t[:, 0]),
        "sample": operators.sample(log_probs, torch.full((5,), 0.5, device=device).double()),
    }
    for name, result in results.items():
        assert result.isfinite().all(), name
        tally.equal(result, result.clone(), name)


def test_attention_over_pages_launches(operators, backend, numbers, tally):
    inputs = [numbers(5, heads, HEAD_DIM, seed=heads) for heads in (4, 2, 2)]
    paged = PagedSequences(inputs, [2, 3], 16)
    out, lse = paged.attend(paged_attention_of(backend), [(0, 0, 2), (1, 2, 3)], 0.1)
    assert out.shape == (3, 4, HEAD_DIM) and lse.shape == (3, 4)
    assert out.isfinite().all() and lse.isfinite().all()
    tally.equal(out, out.clone(), "out")


def test_sglangs_own_matmul_launches(numbers, setting, tally):
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed")
    if setting.device != "cuda":
        pytest.skip("SGLang's kernels need a GPU")
    from sglang.srt.batch_invariant_ops.batch_invariant_ops import matmul_persistent

    x, weight = numbers(5, 64), numbers(48, 64, seed=1)
    exact = x.double() @ weight.double().t()
    tally.close(matmul_persistent(x, weight.t()), exact, 0.1, "matmul_persistent")
