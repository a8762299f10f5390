"""Checks of every GEMM: rows, columns, bias, experts, accuracy and gradients."""

import torch
import torch.nn.functional as F

from onpolicy.ops.backends.base import FP8_BLOCK
from tests.gpu.row_checks import check_gradients, check_rows

DEGREES = (2, 4, 8)
"""Tensor-parallel degrees whose shards are compared with the whole."""


def linears_of_bytes(model):
    """Return a model's rounded linears that consist of whole blocks; some small ones if it has
    none."""
    rounded = {n: s for n, s in model.linears().items() if n not in ("lm_head", "router")}
    whole = {n: s for n, s in rounded.items() if s[0] % FP8_BLOCK == s[1] % FP8_BLOCK == 0}
    return whole or {"small": (2 * FP8_BLOCK, 3 * FP8_BLOCK)}


def make_weight(numbers, *shape):
    return numbers(*shape, seed=sum(shape), scale=shape[-1] ** -0.5)


def check_row_counts(gemm, n, k, row_counts, numbers, tally, case):
    """Check any number of rows, anywhere in a batch, and rows that lie apart in memory."""
    weight, x = make_weight(numbers, n, k), numbers(row_counts[-1], k, seed=1)
    check_rows(lambda rows: gemm(rows, weight), x, row_counts, tally, case)
    apart = torch.cat([x, x], dim=1)[:, :k]  # a single such row counts as contiguous, two do not
    for m in (1, row_counts[len(row_counts) // 2]):
        got, want = gemm(apart[:m], weight), gemm(x[:m], weight)
        tally.equal(got, want, f"{case}, {m} rows apart in memory")


def check_columns(gemm, n, k, row_counts, numbers, tally, case):
    weight = make_weight(numbers, n, k)
    for m in row_counts:
        x = numbers(m, k, seed=2)
        whole = gemm(x, weight)
        for degree in DEGREES:
            if n % degree == 0:
                parts = [gemm(x, shard.clone()) for shard in weight.chunk(degree)]
                tally.equal(torch.cat(parts, 1), whole, f"{case}, {m} rows, {degree} shards")


def check_bias(operators, n, k, row_counts, numbers, tally):
    case = f"linear with bias {n}x{k}"
    weight, bias = make_weight(numbers, n, k), numbers(n, seed=3)
    x = numbers(row_counts[-1], k, seed=1)
    check_rows(lambda rows: operators.linear(rows, weight, bias), x, row_counts, tally, case)
    product = x.double() @ weight.double().t()
    exact = product + bias.double()
    roundings = torch.finfo(x.dtype).eps * (exact.abs() + product.abs())
    bound = roundings + _sum_bound(x, weight)
    tally.close(operators.linear(x, weight, bias), exact, bound, f"{case} against float64")


def check_accuracy(gemm, n, k, rows, numbers, tally, case):
    """Check for a sum in float32, rounded once: no TF32, no bfloat16 partial sums. Gradients to
    float32's."""
    weight, x = make_weight(numbers, n, k), numbers(rows, k, seed=1)
    with torch.no_grad():
        got = gemm(x, weight)
    exact = x.double() @ weight.double().t()
    bound = torch.finfo(got.dtype).eps / 2 * exact.abs() + _sum_bound(x, weight)
    tally.close(got, exact, bound, f"{case} against float64")
    check_gradients(gemm, F.linear, [x, weight], tally, case, _gradient_tolerance(x))


def _sum_bound(x, weight):
    """Return the possible error of a float32 sum of products; TF32 or a bfloat16 sum would lose far
    more."""
    return 2**-18 * x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)


def _gradient_tolerance(x):
    return 2 * torch.finfo(x.dtype).eps + 2**-17


def routed_rows(experts, rows, k, numbers):
    """Return rows sorted by their expert, and that expert: [S, K], int64 [S]. Some experts get
    none."""
    generator = torch.Generator().manual_seed(experts)
    popularity = torch.rand(experts, generator=generator) ** 3
    popularity[1::4] = 0
    chosen = torch.multinomial(popularity, rows, replacement=True, generator=generator)
    return numbers(rows, k, seed=4), chosen.sort().values.to(numbers.device)


def expert_offsets(chosen, experts):
    """Return the start and end of each expert's rows: int64 [S] sorted -> int64 [E + 1]"""
    return torch.searchsorted(chosen, torch.arange(experts + 1, device=chosen.device))


def check_grouped_rows(gemm, shape, row_counts, numbers, tally, case):
    """Check that a row depends on itself and its expert, not on any expert's number of rows, nor on
    shards."""
    experts, n, k = shape
    weight = make_weight(numbers, *shape)
    x, chosen = routed_rows(experts, row_counts[-1], k, numbers)
    whole = gemm(x, weight, expert_offsets(chosen, experts))
    for m in row_counts:
        some = numbers.order(len(x), seed=m)[:m].sort().values
        got = gemm(x[some], weight, expert_offsets(chosen[some], experts))
        tally.equal(got, whole[some], f"{case}, {m} rows")
    for degree in DEGREES:
        if n % degree == 0:
            shards = [shard.clone() for shard in weight.chunk(degree, dim=1)]
            parts = [gemm(x, shard, expert_offsets(chosen, experts)) for shard in shards]
            tally.equal(torch.cat(parts, 1), whole, f"{case}, {degree} shards")


def check_grouped_accuracy(gemm, shape, rows, numbers, tally, case):
    """Compare values and gradients with one float64 product per expert."""
    experts, _, k = shape
    weight = make_weight(numbers, *shape)
    x, chosen = routed_rows(experts, rows, k, numbers)
    offsets = expert_offsets(chosen, experts)
    sizes = offsets.diff().tolist()

    def exact(x, weight):
        return torch.cat([F.linear(*pair) for pair in zip(x.split(sizes), weight, strict=True)])

    def grouped(x, weight):
        return gemm(x, weight, offsets)

    with torch.no_grad():
        got = grouped(x, weight)
    want = exact(x.double(), weight.double())
    sums = [_sum_bound(*pair) for pair in zip(x.split(sizes), weight, strict=True)]
    bound = torch.finfo(got.dtype).eps / 2 * want.abs() + torch.cat(sums)
    tally.close(got, want, bound, f"{case} against float64")
    check_gradients(grouped, exact, [x, weight], tally, case, _gradient_tolerance(x))
