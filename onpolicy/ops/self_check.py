"""The self-check at start-up: are the operators row-invariant here, at this model's sizes?

Row invariance on a CPU rests on how BLAS libraries behave, which is observed and not promised. So
every process that is to keep a contract runs its operators at the shapes of its model, in all the
batch sizes that can occur, and refuses to start if a single bit differs. Digests of the results
are part of what an engine reports: two processes whose operators are each invariant but different
(another CPU, another library) are told apart before they exchange a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.contract import NumericsContract
from onpolicy.errors import ContractError
from onpolicy.ops.base import AttentionLayout, Operators

ROWS = 300
ROW_COUNTS = (1, 2, 7, *range(16, 257, 16), 299)
QUERY_COUNTS = (1, 2, 5, *range(8, 129, 8))


def self_check(operators: Operators, contract: NumericsContract) -> dict[str, str]:
    """Run every operator at the contract's shapes; return a digest of each one's results.

    Raises ContractError that names the operator, its shape and the batch at which a row changed.
    """
    with torch.no_grad():
        return {
            f"{name} {'x'.join(map(str, shape))}": _digest(result)
            for name, shape, result in _results(operators, contract)
        }


def _digest(result: Tensor) -> str:
    return hashlib.sha256(result.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def _results(
    operators: Operators, contract: NumericsContract
) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    dtype, shapes = getattr(torch, contract.dtype), contract.shapes
    for n, k, has_bias in shapes.linear:
        name = "linear with bias" if has_bias else "linear"
        yield name, (n, k), _check_linear(operators, n, k, has_bias, dtype)
    heads = (shapes.heads, shapes.kv_heads, shapes.head_dim)
    yield "attention", heads, _check_attention(operators, *heads, dtype)
    for size in shapes.norm:
        weight = probe(size, seed=1).to(dtype)
        x = probe(ROWS, size, seed=2).to(dtype)
        norm = partial(operators.rms_norm, weight=weight, eps=1e-6)
        yield "rms_norm", (size,), _check_rows("rms_norm", (size,), norm, x)
    for function in (F.silu, F.gelu, torch.sigmoid):
        x = 4 * probe(ROWS, 37, seed=3).to(dtype)
        apply = partial(operators.elementwise, function)
        yield function.__name__, (37,), _check_rows(function.__name__, (37,), apply, x)
    vocabulary = (shapes.vocab_size,)
    logits = 4 * probe(ROWS, shapes.vocab_size, seed=4).to(dtype)
    yield "softmax", vocabulary, _check_rows("softmax", vocabulary, operators.softmax, logits)

    def log_softmax(x: Tensor) -> Tensor:
        return operators.log_softmax(x, torch.full((len(x), 1), 0.7))

    yield "log_softmax", vocabulary, _check_rows("log_softmax", vocabulary, log_softmax, logits)


def probe(*shape: int, seed: int) -> Tensor:
    """Fixed numbers in (-1, 1), the same on every machine, thread count and torch version."""
    size = torch.Size(shape).numel()
    words = (torch.arange(size, dtype=torch.int64) + seed * 7919) * 2654435761 % (1 << 20)
    return ((words.double() - (1 << 19)) / (1 << 19)).float().view(shape)


def _check_rows(
    name: str, shape: tuple[int, ...], function: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """Rows of function(x) must not change when the batch is cut or turned round."""
    reference = function(x)
    for rows in ROW_COUNTS:
        _require_equal(name, shape, f"{rows} rows", function(x[:rows]), reference[:rows])
    _require_equal(name, shape, "rows in reverse", function(x.flip(0)), reference.flip(0))
    return reference


def _check_linear(
    operators: Operators, n: int, k: int, has_bias: bool, dtype: torch.dtype
) -> Tensor:
    # One full and the last partial column tile stand for all: the rest run the same GEMMs.
    tile = operators.column_tile
    columns = n if tile is None or n <= tile else tile + n % tile
    weight = (probe(columns, k, seed=5) / k**0.5).to(dtype)
    bias = probe(columns, seed=6).to(dtype) if has_bias else None
    x = probe(ROWS, k, seed=7).to(dtype)
    return _check_rows("linear", (n, k), lambda t: operators.linear(t, weight, bias), x)


def _check_attention(
    operators: Operators, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    lens = (300, 1, 64, 65, 17)
    total, scale, shape = sum(lens), head_dim**-0.5, (heads, kv_heads, head_dim)
    q = probe(total, heads, head_dim, seed=8).to(dtype)
    k = probe(total, kv_heads, head_dim, seed=9).to(dtype)
    v = probe(total, kv_heads, head_dim, seed=10).to(dtype)
    packed = operators.attention(q, k, v, AttentionLayout.packed(lens), scale)
    # The last `count` tokens of the longest sequence as queries, the others as a cached prefix.
    for count in QUERY_COUNTS:
        layout = AttentionLayout(
            query_lens=(count,), key_lens=lens[:1], key_rows=torch.arange(lens[0])[None]
        )
        rows = slice(lens[0] - count, lens[0])
        alone = operators.attention(q[rows], k, v, layout, scale)
        _require_equal("attention", shape, f"{count} queries alone", alone, packed[rows])
    # One decode step of all the sequences at once.
    ends = torch.tensor(lens).cumsum(0)
    layout = AttentionLayout(
        query_lens=(1,) * len(lens), key_lens=lens, key_rows=AttentionLayout.packed(lens).key_rows
    )
    decode = operators.attention(q[ends - 1], k, v, layout, scale)
    _require_equal("attention", shape, "a decode step", decode, packed[ends - 1])
    return packed


def _require_equal(name: str, shape: tuple[int, ...], case: str, got: Tensor, want: Tensor) -> None:
    if not torch.equal(got, want):
        raise ContractError(
            f"operator={name}, shape={shape}, case={case!r}: {int((got != want).sum())} of "
            f"{want.numel()} values differ from the same rows in a larger batch, so this "
            "machine's kernels are not row-invariant and rollout and training cannot agree bit for "
            "bit. Run without --true-on-policy-mode here, and report the CPU and torch version."
        )
