"""The causal convolution of a gated delta network, in one pass over memory.

Row invariance: an element's inputs are added one after another, and nothing else is summed. Every
product and sum is rounded by itself, so the bits are those of PyTorch's kernels in
`ops/recurrence.py`, which training uses for their gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onpolicy.ops.triton.delta_rule import DeviceLayout, sequence_of
from onpolicy.ops.triton.device import UNFUSED, next_power_of_2

ROWS, COLUMNS = 16, 128


@triton.jit
def _load_inputs(
    x: tl.tensor, held: tl.tensor, positions: tl.tensor, past: tl.tensor, end: tl.tensor,
    columns: tl.tensor, stride_x: tl.tensor, SIZE: tl.constexpr, KERNEL: tl.constexpr,
    HAS_STATES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load inputs [rows, columns] at positions before `end`, among the new ones or the held ones."""
    is_column = (columns < SIZE)[None, :]
    is_new = (positions >= past) & (positions < end)
    mask = is_new[:, None] & is_column
    values = tl.load(x + (positions * stride_x)[:, None] + columns[None, :], mask=mask, other=0.0)
    if HAS_STATES:
        rows = (positions - past + (KERNEL - 1)) * SIZE
        mask = ((positions >= 0) & (positions < past))[:, None] & is_column
        old = tl.load(held + rows[:, None] + columns[None, :], mask=mask, other=0.0)
        values = tl.where(is_new[:, None], values, old)
    return values


@triton.jit(do_not_specialize=["stride_x", "stride_slot"])
def _conv_kernel(
    starts: tl.tensor, past_lens: tl.tensor, slots: tl.tensor,
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, states: tl.tensor, out: tl.tensor,
    stride_x: tl.tensor, stride_slot: tl.tensor,
    SIZE: tl.constexpr, KERNEL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KEPT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATES: tl.constexpr,
) -> None:  # fmt: skip
    block, sequence = tl.program_id(0), tl.program_id(2)
    origin, past, length = sequence_of(sequence, starts, past_lens)
    positions = past + block * ROWS + tl.arange(0, ROWS).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < SIZE
    x += origin * stride_x
    held = states + tl.load(slots + sequence) * stride_slot
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for number in tl.static_range(KERNEL):
        inputs = _load_inputs(
            x, held, positions - (KERNEL - 1) + number, past, length, columns, stride_x,
            SIZE, KERNEL, HAS_STATES,
        )  # fmt: skip
        factor = tl.load(weight + columns * KERNEL + number, mask=is_column, other=0.0)
        total += inputs.to(tl.float32) * factor.to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    mask = (positions < length)[:, None] & is_column[None, :]
    at = (origin + positions) * SIZE
    tl.store(out + at[:, None] + columns[None, :], total.to(out.dtype.element_ty), mask=mask)
    if HAS_STATES and block == 0:  # which alone reads the store: later rows' inputs are new
        rows = tl.arange(0, KEPT)
        last = length - (KERNEL - 1) + rows.to(tl.int64)
        kept = _load_inputs(
            x, held, last, past, length, columns, stride_x, SIZE, KERNEL, HAS_STATES
        )
        tl.debug_barrier()  # all threads have read it
        is_kept = (rows < KERNEL - 1)[:, None] & is_column[None, :]
        tl.store(held + rows[:, None] * SIZE + columns[None, :], kept, mask=is_kept)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: DeviceLayout,
    states: Tensor | None,
) -> Tensor:
    """Compute `Operators.causal_conv` and update the states; no autograd."""
    (tokens, size), kernel = x.shape, weight.shape[1]
    assert kernel - 1 <= ROWS and (states is None or states[:1].is_contiguous())
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(tokens, size)
    grid = triton.cdiv(layout.max_query_len, ROWS), triton.cdiv(size, COLUMNS), len(layout.slots)
    if tokens:
        _conv_kernel[grid](
            layout.starts, layout.past_lens, layout.slots, x, weight.contiguous(),
            weight if bias is None else bias, x if states is None else states, out,
            x.stride(0), 0 if states is None else states.stride(0), SIZE=size, KERNEL=kernel,
            ROWS=ROWS, COLUMNS=COLUMNS, KEPT=next_power_of_2(kernel), HAS_BIAS=bias is not None,
            HAS_STATES=states is not None, num_warps=4, **UNFUSED,
        )  # fmt: skip
    return out
