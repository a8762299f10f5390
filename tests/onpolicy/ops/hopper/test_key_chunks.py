"""Long sequences in chunks of keys, with FlashAttention-3's interface in PyTorch."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from onpolicy.contract import FLASH_CHUNK, AttentionShape
from onpolicy.errors import ContractError
from onpolicy.ops.checks.self_check import AttentionInputs, check_paged_attention
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.hopper import HopperOperators, flash_attention, key_chunks
from onpolicy.ops.layouts import AttentionLayout, PagedLayout, ScoreRule
from onpolicy.ops.shared_rows import SharedRows
from tests.support.kernel_launches import count_kernels
from tests.support.recorded_kernels import flash_attn

HEADS, KV_HEADS, DIM, CHUNK = 4, 2, 16, 8
SCORES = ScoreRule(DIM**-0.5)
LENS = (9, 1, 29, 8, 7, 16)
SHORT = [i for i, n in enumerate(LENS) if n <= CHUNK]
OPERATORS = HopperOperators.__new__(HopperOperators)  # without loading the libraries
BOTH = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"]
)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    made = []
    module = flash_attn(made)
    monkeypatch.setattr(flash_attention, "loaded", lambda: module)
    monkeypatch.setattr(flash_attention, "has_upstream", lambda: True)
    monkeypatch.setattr(key_chunks, "FLASH_CHUNK", CHUNK)
    return made


def inputs(tokens, dtype=torch.float32):
    numbers = torch.Generator().manual_seed(tokens)
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(tokens, heads, DIM, generator=numbers).to(dtype) for heads in sizes]


def train(packed, lens=LENS, scores=SCORES):
    """out [T, H, D] and lse [H, T] of whole sequences laid end to end"""
    return flash_attention.forward(*packed, AttentionLayout.packed(tuple(lens)), scores)


def paged(packed, lens, counts, page_size=1, wider=0):
    """Rows of the last `counts` queries, stores of keys and values amid NaN, and their layout."""
    _, k, v = packed
    pages = -(-max(lens) // page_size)
    table = torch.arange(len(lens) * pages).flip(0).view(len(lens), pages)
    stores = [
        x.new_full(((len(lens) * pages + 1) * page_size, *x.shape[1:]), torch.nan) for x in (k, v)
    ]
    for owner, *parts in zip(table, k.split(lens), v.split(lens), strict=True):
        slots = (owner[:, None] * page_size + torch.arange(page_size)).flatten()
        for store, part in zip(stores, parts, strict=True):
            store[slots[: len(part)]] = part
    layout = PagedLayout(
        page_table=torch.nn.functional.pad(table, (0, wider)).to(torch.int32),
        page_size=page_size,
        key_lens=torch.tensor(lens, dtype=torch.int32),
        query_starts=torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32),
        max_query_len=max(counts),
    )
    ends = torch.tensor(lens).cumsum(0).tolist()
    rows = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, counts, strict=True)])
    return rows, [store.view(-1, page_size, KV_HEADS, DIM) for store in stores], layout


CASES = {
    "decode": [1] * len(LENS),
    "decode beside nothing": [1, 0, 1, 1, 0, 1],
    "a cached prefix": [2, 1, 13, 1, 7, 9],
    "drafts": [2, 1, 3, 2, 1, 2],
    "a prefill": [*LENS],
}


@BOTH
@pytest.mark.parametrize(
    ("case", "page_size", "wider", "most"),
    [
        ("decode", 1, 0, 1 << 14),
        ("decode beside nothing", 4, 11, 1 << 14),
        ("a cached prefix", 4, 11, 1 << 14),
        ("a cached prefix", 1, 0, 40),
        ("drafts", 1, 0, 1 << 14),
        ("a prefill", 4, 0, 80),
    ],
)
def test_decode_cached_prefixes_and_prefill_have_the_bits_of_training(
    monkeypatch, dtype, case, page_size, wider, most
):
    packed = inputs(sum(LENS), dtype)
    out, lse = train(packed)
    monkeypatch.setattr(key_chunks, "MOST_PARTS", most)
    rows, stores, layout = paged(packed, LENS, CASES[case], page_size, wider)
    got, got_lse = flash_attention.attend(packed[0][rows], *stores, layout, SCORES)
    assert torch.equal(got, out[rows]) and torch.equal(got_lse, lse[:, rows])
    buffer = torch.empty_like(got)
    again = OPERATORS.paged_attention(packed[0][rows], *stores, layout, SCORES, out=buffer)
    assert again is buffer and torch.equal(again, out[rows])


@BOTH
def test_a_sequence_of_one_chunk_keeps_its_bits_beside_longer_ones(monkeypatch, dtype):
    packed = inputs(sum(LENS), dtype)
    out, lse = train(packed)
    rows = torch.arange(sum(LENS)).split(LENS)
    monkeypatch.setattr(key_chunks, "FLASH_CHUNK", 64)  # so that nothing is cut
    whole, whole_lse = train(packed)
    for i in SHORT:
        assert torch.equal(out[rows[i]], whole[rows[i]])
        assert torch.equal(lse[:, rows[i]], whole_lse[:, rows[i]])
    assert not torch.equal(lse, whole_lse)


def test_what_is_no_longer_than_a_chunk_and_layers_with_windows_take_one_call(calls):
    lens = [LENS[i] for i in SHORT]
    train(inputs(sum(lens)), lens)
    train(inputs(sum(LENS)), scores=ScoreRule(1.0, window=20))
    assert [(call.page_table.shape, call.causal) for call in calls] == [
        ((3, 8), True), ((6, 29), True),
    ]  # fmt: skip


def by_hand(packed, bounds):
    """The last query's results over the keys between bounds, merged in this order: out and lse"""
    q, k, v = packed
    parts = []
    for first, end in bounds:
        layout = AttentionLayout(
            query_lens=(1,), key_lens=(end - first,), key_rows=torch.arange(first, end)[None]
        )
        call = flash_attention.int32_pages(layout)
        parts.append(flash_attention._call(q[-1:], k[:, None], v[:, None], call, SCORES,
                                           return_softmax_lse=True)[:2])  # fmt: skip
    out, lse = torch.empty_like(q[-1:]), torch.empty(HEADS, 1)
    outs, lses = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)
    key_chunks._merge(outs, lses, len(parts), (1, 1), out, lse)
    return out, lse


def test_other_chunks_another_origin_and_another_order_have_other_bits():
    packed = inputs(29)
    right = train(packed, (29,))
    chunks = [(0, 8), (8, 16), (16, 24), (24, 29)]
    out, lse = by_hand(packed, chunks)
    assert torch.equal(out, right[0][-1:]) and torch.equal(lse, right[1][:, -1:])
    wrong = {
        "chunks of 4": [(i, min(i + 4, 29)) for i in range(0, 29, 4)],
        "from position 3": [(0, 3), (3, 11), (11, 19), (19, 27), (27, 29)],
        "in descending order": chunks[::-1],
    }
    for name, bounds in wrong.items():
        out, lse = by_hand(packed, bounds)
        assert not torch.equal(out, right[0][-1:]), name
        torch.testing.assert_close(out, right[0][-1:])
        torch.testing.assert_close(lse, right[1][:, -1:])


@BOTH
def test_results_are_close_to_float64(dtype):
    packed = inputs(sum(LENS), dtype)
    out, lse = train(packed)
    for part, rows in zip(out.split(LENS), torch.arange(sum(LENS)).split(LENS), strict=True):
        q, k, v = (x[rows].double().transpose(0, 1) for x in packed)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        scores = (q @ k.mT / math.sqrt(DIM)).masked_fill(
            torch.ones(len(rows), len(rows)).triu(1).bool(), -torch.inf
        )
        bound = 1e-5 if dtype == torch.float32 else 2**-7
        want = (scores.softmax(-1) @ v).transpose(0, 1)
        torch.testing.assert_close(part.double(), want, rtol=bound, atol=bound)
        torch.testing.assert_close(
            lse[:, rows].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5
        )


def test_gradients_are_right_and_do_not_depend_on_longer_sequences_in_the_batch():
    leaves = [x.requires_grad_() for x in inputs(sum(LENS))]
    theirs = [x.detach().clone().requires_grad_() for x in leaves]
    grad, layout = torch.randn(sum(LENS), HEADS, DIM), AttentionLayout.packed(LENS)
    OPERATORS.attention(*leaves, layout, SCORES).backward(grad)
    CpuOperators().attention(*theirs, layout, SCORES).backward(grad)
    for ours, want in zip(leaves, theirs, strict=True):
        torch.testing.assert_close(ours.grad, want.grad)
    for i in SHORT:
        rows = torch.arange(sum(LENS)).split(LENS)[i]
        alone = [x.detach()[rows].requires_grad_() for x in leaves]
        one = AttentionLayout.packed((len(rows),))
        OPERATORS.attention(*alone, one, SCORES).backward(grad[rows])
        for x, whole in zip(alone, leaves, strict=True):
            assert torch.equal(x.grad, whole.grad[rows])


def test_a_prompt_that_answers_share_has_the_bits_of_whole_sequences():
    """A prompt of 20 tokens, and answers of 15 and 9."""
    path = [*range(20), *range(35, 44)]
    shared = AttentionLayout(
        query_lens=(35, 9), key_lens=(35, 29), key_rows=torch.tensor([[*range(35)], path + [0] * 6]),
        shared_keys=SharedRows.of([*range(35), *path]),
    )  # fmt: skip
    packed = inputs(44)
    got = flash_attention.forward(*packed, shared, SCORES)[0]
    want = train([x[[*range(35), *path]] for x in packed], (35, 29))[0]
    assert torch.equal(got, want[[*range(35), *range(55, 64)]])


def test_attention_of_a_cut_step_reads_nothing_on_the_host_and_adds_few_kernels():
    """As a CUDA graph needs it."""
    rows, _, layout = paged(inputs(sum(LENS)), LENS, CASES["decode"])
    q = torch.randn(len(rows), HEADS, DIM)

    def attend(q, **_):
        return q, q.new_empty(HEADS, len(q))

    counted = count_kernels(lambda: key_chunks.attend_in_chunks(attend, q, layout))
    assert counted == {"_cut_kernel": 1, "aten::clone": 1, "_merge_kernel": 1}
    rows, _, layout = paged(inputs(sum(LENS)), LENS, CASES["drafts"])
    q = torch.randn(len(rows), HEADS, DIM)
    counted = count_kernels(lambda: key_chunks.attend_in_chunks(attend, q, layout))
    assert "aten::_local_scalar_dense" not in counted and counted["_cut_kernel"] == 2


@pytest.mark.parametrize("case", ["decode", "a cached prefix"])
def test_calls_over_chunks_take_no_schedule_of_whole_sequences_and_cover_all_rows(calls, case):
    """Reported: vllm-project/vllm#17283 (a schedule for another number of sequences is refused) and
    sgl-project/sgl-flash-attn#47 (starts that end before the last row corrupt a result)."""
    packed = inputs(sum(LENS))
    rows, stores, layout = paged(packed, LENS, CASES[case])
    layout = replace(layout, schedule={"scheduler_metadata": torch.zeros(9, dtype=torch.int32)})
    OPERATORS.paged_attention(packed[0][rows], *stores, layout, SCORES)
    assert len(calls) == (1 if case == "decode" else 2)
    for call in calls:
        assert call.scheduler_metadata is None and call.num_splits == 1
        lens = call.cu_seqlens_q.diff()
        assert call.cu_seqlens_q[0] == 0 and call.cu_seqlens_q[-1] == len(call.q)
        assert lens.min() >= 0 and lens.max() <= call.max_seqlen_q
        assert call.cache_seqlens.min() >= 0 and call.cache_seqlens.max() == CHUNK


def merged(outs, lses):
    out, lse = torch.empty(1, 1, DIM), torch.empty(1, 1)
    parts = torch.tensor(outs)[:, None, None].expand(-1, 1, DIM).contiguous()
    key_chunks._merge(parts, torch.tensor(lses)[None], len(outs), (1, 1), out, lse)
    return out[0, 0, 0].item(), lse.item()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_chunks_without_keys_change_nothing_and_nan_is_never_one_of_them():
    """Reported: vllm-project/vllm#39148 and flashinfer-ai/flashinfer#4051 (NaN where no part has keys);
    Dao-AILab/flash-attention#978 (an older kernel's +inf for no keys must not pass for a number)."""
    nothing = -math.inf
    assert merged([0.0, 0.0], [nothing, nothing]) == (0.0, nothing)
    one = merged([3.0], [5.3])
    assert (
        one == merged([0.0, 3.0, 0.0], [nothing, 5.3, nothing]) == (3.0, torch.tensor(5.3).item())
    )
    for bad in (math.nan, math.inf):
        assert all(map(math.isnan, merged([3.0, 0.0], [5.3, bad])))


def test_pages_that_a_chunk_would_cut_are_refused():
    packed = inputs(sum(LENS))
    rows, stores, layout = paged(packed, LENS, CASES["decode"], page_size=3)
    with pytest.raises(
        ContractError, match=r"page_size=3: .* of 8 keys .* whole pages. Use pages of 1"
    ):
        OPERATORS.paged_attention(packed[0][rows], *stores, layout, SCORES)


def test_the_check_at_start_up_refuses_kernels_that_disagree_about_visible_keys(monkeypatch):
    kind = AttentionShape(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, value_dim=DIM)
    made = AttentionInputs.of(kind, torch.float32, lens=(26, 1, 9))
    right = flash_attention.loaded().flash_attn_with_kvcache

    def one_bit_off_without_a_mask(**how):
        result = right(**how)
        if not how["causal"]:
            result[0].copy_(torch.nextafter(result[0], torch.tensor(math.inf)))
        return result

    def check():
        packed = made.attend(OPERATORS, AttentionLayout.packed(made.lens))
        check_paged_attention(OPERATORS, made, packed)

    assert HopperOperators.key_chunk == FLASH_CHUNK  # which the check's longest sequence exceeds
    with torch.no_grad():
        check()
        wrong = SimpleNamespace(flash_attn_with_kvcache=one_bit_off_without_a_mask)
        monkeypatch.setattr(flash_attention, "loaded", lambda: wrong)
        with pytest.raises(ContractError, match=r"paged_attention.*a decode step"):
            check()


COMPILE = """
import json
import torch
from onpolicy.ops.hopper.key_chunks import attend_in_chunks
from onpolicy.ops.layouts import PagedLayout
from tests.onpolicy.ops.triton.compile_kernels import compile_launches

def attend(q, **_):
    return q, q.new_empty(q.shape[1], len(q), dtype=torch.float32)

kernels = compile_launches(90)
ints = torch.empty(5, dtype=torch.int32, device="meta")
for longest in (1, 9):
    layout = PagedLayout(
        page_table=ints.new_empty(4, 9000), page_size=1, key_lens=ints[:4], query_starts=ints,
        max_query_len=longest,
    )
    for dim in (96, 128, 192, 256):
        q = torch.empty(4 * longest, 32, dim, dtype=torch.bfloat16, device="meta")
        attend_in_chunks(attend, q, layout)
print(json.dumps(list(kernels.values())))
"""


@pytest.mark.kernels
def test_its_kernels_compile_for_hopper_without_spilling_or_fusing():
    done = subprocess.run([sys.executable, "-c", COMPILE], stdout=subprocess.PIPE, check=True)
    kernels = json.loads(done.stdout)
    assert {kernel["name"] for kernel in kernels} == {"_cut_kernel", "_merge_kernel"}
    assert not any(kernel["stack"] or kernel["fused"] for kernel in kernels)
