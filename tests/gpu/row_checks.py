"""Row invariance as a check: a function of rows must give each row the same bits in any company."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Numbers:
    """Normal numbers of one dtype on one device, the same at every call."""

    dtype: torch.dtype
    device: str

    def __call__(self, *shape, seed=0, scale=1.0):
        generator = torch.Generator(self.device).manual_seed(seed)
        numbers = torch.randn(*shape, generator=generator, device=self.device)
        return (scale * numbers).to(self.dtype)

    def order(self, size, seed=0):
        """Return a permutation of 0 ... size - 1, the same on every device: int64 [size]"""
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(size, generator=generator).to(self.device)


def check_rows(function, x, row_counts, tally, case):
    """Compare calls on fewer rows, on rows elsewhere in the batch and in another order.

    `row_counts` are numbers of rows to try; `x` holds at least as many as the largest.
    """
    whole = function(x)
    for m in row_counts:
        tally.equal(function(x[:m]), whole[:m], f"{case}, first {m} rows")
    for m in row_counts[:: max(1, len(row_counts) // 12)]:
        tally.equal(function(x[-m:]), whole[-m:], f"{case}, last {m} rows")
    order = Numbers(x.dtype, x.device.type).order(len(x))
    tally.equal(function(x[order]), whole[order], f"{case}, rows shuffled")


def check_gradients(function, exact, inputs, tally, case, tolerance):
    """Check that the forward pass has inference's bits, and that gradients repeat and are right.

    `exact` is the same function for float64 inputs; errors are relative to a gradient's largest.
    """
    with torch.no_grad():
        inference = function(*inputs)
    grad = Numbers(inference.dtype, inference.device.type)(*inference.shape, seed=99)

    def gradients(function, dtype):
        leaves = [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        if dtype is None:
            tally.equal(out.detach(), inference, f"{case}, forward pass of training")
        return list(torch.autograd.grad(out, leaves, grad.to(out.dtype)))

    first = gradients(function, None)
    for run in (2, 3):
        for i, (got, want) in enumerate(zip(gradients(function, None), first, strict=True)):
            tally.equal(got, want, f"{case}, gradient {i}, run {run}")
    for i, (got, want) in enumerate(zip(first, gradients(exact, torch.float64), strict=True)):
        bound = tolerance * want.abs().max()
        tally.close(got, want, bound, f"{case}, gradient {i} against float64")
