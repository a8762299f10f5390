"""What the GPU kernel libraries look like from Python, recorded, and stand-ins that insist on it.

Neither library loads without a GPU. Their signatures were copied from the packages named below and
their checks from the sources; a call with another name, type or layout fails here as it would there.
What a stand-in computes is the plain mathematics in float32.
"""

import functools
import inspect
from types import SimpleNamespace

import torch
from torch import library

# sgl-deep-gemm, deep_gemm/__init__.py.
BF16_GEMM_NT = {
    "0.1.5.post1": "(a, b, d, c=None, compiled_dims='')",
    "0.2.0": "(a, b, d, c=None, compiled_dims='', alpha=None)",
    "0.2.5": "(a, b, d, c=None, compiled_dims='', alpha=None, epilogue=None)",
}

# The same file; read in the first and the last of these versions.
FP8_GEMM_NT = {
    "0.1.5.post1": "(a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims='', "
    "disable_ue8m0_cast=False)",
    "0.2.5": "(a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims='', "
    "disable_ue8m0_cast=False, alpha=None, epilogue=None)",
}

# sglang-kernel 0.4.5 and 0.4.7, sgl_kernel/flash_attn.py.
FLASH_ATTN_WITH_KVCACHE = (
    "(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
    "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
    "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), attention_chunk=None, softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, only_qv=False, sm_margin=0, "
    "return_softmax_lse=False, sinks=None, score_mod=None, aux_tensors=None, ver=3, out=None)"
)

# The same versions, flash_ops.abi3.so, torch.ops.sgl_kernel.fwd; arguments in the order of the schema.
SGL_KERNEL_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, "
    "Tensor(a!)? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, "
    "Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, "
    "Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float? softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, int attention_chunk, float softcap, bool is_rotary_interleaved, "
    "Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? sinks, "
    "Tensor? sparse_mask_fine, bool only_qv) -> (Tensor(a!), Tensor, Tensor, Tensor)"
)

# Dao-AILab/flash-attention, hopper/flash_api_stable.cpp, torch.ops.flash_attn_3.bwd.
FLASH_ATTN_3_BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq = None, Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, "
    "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, float softcap = 0.0, bool deterministic = False, "
    "int sm_margin = 0) -> "
    "(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def signature(text):
    """The signature that a function `def f<text>` would have."""
    scope = {}
    exec(f"def function{text}: pass", scope)
    return inspect.signature(scope["function"])


def deep_gemm(version, calls):
    """A stand-in for the module; every product's operands are added to `calls`."""
    parameters = signature(BF16_GEMM_NT[version])

    def bf16_gemm_nt(*args, **kwargs):
        call = SimpleNamespace(**parameters.bind(*args, **kwargs).arguments)
        for operand in (call.a, call.b):  # csrc/utils/layout.hpp and TMA's own rules
            assert operand.dtype == torch.bfloat16
            assert 1 in operand.stride()
            assert max(operand.stride()) % 8 == 0
            assert operand.data_ptr() % 16 == 0
        assert call.d.dtype in (torch.bfloat16, torch.float32)
        assert call.d.is_contiguous()
        call.d.copy_(call.a.float() @ call.b.float().t())
        calls.append(call)

    module = SimpleNamespace(bf16_gemm_nt=bf16_gemm_nt, deterministic=False)
    if version in FP8_GEMM_NT:
        module.fp8_gemm_nt = _fp8_gemm_nt(signature(FP8_GEMM_NT[version]), calls)
    if version.startswith("0.2"):
        module.use_deterministic_algorithms = lambda on: setattr(module, "deterministic", on)
    return module


def _fp8_gemm_nt(parameters, calls):
    """On compute capability 9.0: csrc/apis/gemm.hpp, layout.hpp and sm90_fp8_gemm_1d{1,2}d.hpp."""

    def fp8_gemm_nt(*args, **kwargs):
        call = SimpleNamespace(**parameters.bind(*args, **kwargs).arguments)
        assert type(call.a) is type(call.b) is tuple  # deep_gemm/__init__.py asks so
        for numbers, _ in (call.a, call.b):
            assert numbers.dtype == torch.float8_e4m3fn
            assert numbers.stride() == (numbers.shape[1], 1)
            assert numbers.shape[1] % 16 == numbers.data_ptr() % 16 == 0
        (x, of_x), (weight, of_weight) = call.a, call.b
        (M, K), N = x.shape, len(weight)
        assert N % 8 == 0 and call.d.shape == (M, N) and call.d.is_contiguous()
        _check_scales_by_column(of_x, M, K)
        if call.recipe == (1, 128, 128):
            assert call.d.dtype == torch.bfloat16 and not hasattr(call, "c")
            assert of_weight.dtype == torch.float32 and of_weight.is_contiguous()
            assert of_weight.shape == (-(-N // 128), -(-K // 128))
            of_weight = of_weight.repeat_interleave(128, 0)[:N]
            call.d.copy_(_sum_of_blocks(x, of_x, weight, of_weight))
        else:
            assert call.recipe == (1, 1, 128)
            assert call.d.dtype == torch.float32 and call.c is call.d
            _check_scales_by_column(of_weight, N, K)
            call.d.add_(_sum_of_blocks(x, of_x, weight, of_weight))
        calls.append(call)

    return fp8_gemm_nt


def _check_scales_by_column(scales, rows, K):
    """What the library takes as it is: get_mn_major_tma_aligned_tensor."""
    assert scales.dtype == torch.float32 and scales.shape == (rows, -(-K // 128))
    assert scales.stride() == (1, -(-rows // 4) * 4) and scales.data_ptr() % 16 == 0


def _sum_of_blocks(x, of_x, weight, of_weight):
    """float32 [M, N], blocks of K in ascending order. What a block sums to is exact in float64, so no
    number of rows has bits of its own."""
    total = torch.zeros(len(x), len(weight))
    blocks = x.double().split(128, 1), weight.double().split(128, 1)
    for scale_x, scale_weight, left, right in zip(of_x.t(), of_weight.t(), *blocks, strict=True):
        total += scale_x[:, None] * scale_weight * (left @ right.t()).float()
    return total


_LIBRARY = library.Library("recorded", "DEF")
_LIBRARY.define(SGL_KERNEL_FWD)
FA3 = library.Library("flash_attn_3", "DEF")
FA3.define(FLASH_ATTN_3_BWD)


def flash_attn(calls):
    """A stand-in for the module sgl_kernel.flash_attn; what it is called with is added to `calls`."""
    parameters = signature(FLASH_ATTN_WITH_KVCACHE)

    def flash_attn_with_kvcache(*args, **kwargs):
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        call = SimpleNamespace(**bound.arguments)
        calls.append(call)
        out, lse, *rest = torch.ops.recorded.fwd(
            call.q, call.k_cache, call.v_cache, call.k, call.v, call.qv, call.out,
            call.cu_seqlens_q, None, call.cu_seqlens_k_new, None, call.cache_seqlens,
            call.max_seqlen_q, None, call.page_table, call.cache_batch_idx, call.cache_leftpad,
            call.rotary_cos, call.rotary_sin, call.rotary_seqlens, call.q_descale, call.k_descale,
            call.v_descale, call.softmax_scale, call.causal, *call.window_size,
            call.attention_chunk or 0, call.softcap, call.rotary_interleaved,
            call.scheduler_metadata, call.num_splits, call.pack_gqa, call.sm_margin, call.sinks,
            None, call.only_qv,
        )  # fmt: skip
        return (out, lse, *rest) if call.return_softmax_lse else out

    return SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)


def attend(q, k, v, query_starts, key_starts, scale, before=-1, softcap=0.0, causal=True):
    """Attention over packed sequences in float32: out [T, H, D_v], lse [H, T]; without keys 0, -inf.

    before: keys before its own that a query sees, -1 for all. A row has the same bits in every call:
    all sums are ascending chains, keys that a query does not see add exact zeros, and exponentials
    are rounded from float64.
    """
    outs, lses = [], []
    group = q.shape[1] // k.shape[1]
    for queries, keys in zip(query_starts.unfold(0, 2, 1), key_starts.unfold(0, 2, 1), strict=True):
        qs = q[queries[0] : queries[1]].float()[:, None]
        ks, vs = (x[keys[0] : keys[1]].float().repeat_interleave(group, 1) for x in (k, v))
        scores = _chain((qs * ks).unbind(-1), qs[:, 0, :, 0]) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        offset = len(ks) - len(qs)
        mask = torch.ones(scores.shape[:2], dtype=torch.bool)
        mask = mask.tril(offset) if causal else mask
        mask = mask.triu(offset - before) if before >= 0 else mask
        scores = scores.masked_fill(~mask[..., None], float("-inf"))
        nothing = scores.new_full((len(qs), 1, q.shape[1]), float("-inf"))
        largest = torch.cat([nothing, scores], 1).amax(1).detach()
        base = largest.masked_fill(largest.isinf(), 0.0)
        weights = (scores - base[:, None]).double().exp().float()
        total = _chain(weights.unbind(1), base)
        mixed = _chain(
            (weights[..., None] * vs).unbind(1), base[..., None].expand(-1, -1, v.shape[-1])
        )
        outs.append(mixed / total.masked_fill(total == 0, 1.0)[..., None])
        lses.append((base + total.double().log().float()).t())
    return torch.cat(outs), torch.cat(lses, 1)


def _chain(addends, like):
    """Their sum in ascending order, or zeros in the shape of `like`."""
    return functools.reduce(torch.add, addends) if addends else torch.zeros_like(like)


def _fwd(q, k, v, *rest):
    names = [argument.name for argument in torch.ops.recorded.fwd.default._schema.arguments]
    given = SimpleNamespace(**dict(zip(names[3:], rest, strict=True)))
    batch = len(given.cu_seqlens_q) - 1
    for ints in (given.cu_seqlens_q, given.seqused_k, given.page_table):  # flash_api.cpp
        assert ints.dtype == torch.int32
        assert ints.is_contiguous()
    assert given.page_table.shape[0] == len(given.seqused_k) == batch
    assert q.dim() == 3 and k.dim() == v.dim() == 4
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert given.max_seqlen_q >= int(given.cu_seqlens_q.diff().max())
    assert given.window_size_left < 0 or (given.is_causal and given.window_size_right == 0)
    page_size = k.shape[1]
    rows = given.page_table.long()[..., None] * page_size + torch.arange(page_size)
    lens = given.seqused_k.tolist()
    chosen = torch.cat([row.flatten()[:n] for row, n in zip(rows, lens, strict=True)])
    starts = torch.tensor([0, *lens]).cumsum(0)
    out, lse = attend(
        q, k.flatten(0, 1)[chosen], v.flatten(0, 1)[chosen], given.cu_seqlens_q, starts,
        given.softmax_scale, given.window_size_left, given.softcap, given.is_causal,
    )  # fmt: skip
    out = out.to(q.dtype) if given.out is None else given.out.copy_(out)
    return out, lse, q.new_empty(0), q.new_empty(0)


_LIBRARY.impl("fwd", _fwd, "CPU")


def _bwd(*args):
    names = [argument.name for argument in torch.ops.flash_attn_3.bwd.default._schema.arguments]
    given = SimpleNamespace(**dict(zip(names, args, strict=False)))
    assert given.softmax_lse.dtype == torch.float32
    assert given.softmax_lse.shape == (given.q.shape[1], given.q.shape[0])
    assert given.is_causal and given.deterministic
    with torch.enable_grad():
        inputs = [x.detach().float().requires_grad_() for x in (given.q, given.k, given.v)]
        out, lse = attend(
            *inputs, given.cu_seqlens_q, given.cu_seqlens_k, given.softmax_scale,
            given.window_size_left, given.softcap,
        )  # fmt: skip
        torch.testing.assert_close(out.to(given.out.dtype), given.out)
        torch.testing.assert_close(lse, given.softmax_lse)
        grads = torch.autograd.grad(out, inputs, given.dout.float())
    for held, grad in zip((given.dq, given.dk, given.dv), grads, strict=True):
        held.copy_(grad)
    empty = given.q.new_empty(0)
    return given.dq, given.dk, given.dv, empty, empty, empty, empty, empty


FA3.impl("bwd", _bwd, "CPU")
