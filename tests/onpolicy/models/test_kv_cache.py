"""Keys and values in 8 bits: the bytes of a cache, what is read back, and the gradient."""

import pytest
import torch

from onpolicy.models.kv_cache import as_cached, packed, packed_size, unpacked
from onpolicy.ops import AttentionLayout, ScoreRule
from onpolicy.ops.cpu import CpuOperators

FORMATS = {"int8": 127, "fp8_e4m3": 448}
LENS = (7, 3)
TOKENS = sum(LENS)


def heads(dim=6, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(TOKENS, 2, dim, generator=generator)
        * 2.0 ** torch.arange(TOKENS)[:, None, None]
    )
    return x.to(dtype)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bytes_of_a_cache_are_what_the_trainer_computes_with(kv_format, dtype):
    x = heads(dtype=dtype)
    rows = packed(x, kv_format)
    assert rows.dtype == torch.uint8 and rows.shape == (*x.shape[:2], packed_size(6))
    read = unpacked(rows, kv_format, dtype)
    assert read.dtype == dtype and torch.equal(read, as_cached(x, kv_format))
    assert not torch.equal(read, x)
    largest = x.float().abs().amax(-1, keepdim=True)
    close = 0.5 / FORMATS[kv_format] if kv_format == "int8" else 2**-4
    assert ((read.float() - x.float()).abs() <= (close + 2**-8) * largest).all()
    # A token and a head alone, and in a wider store, have the same bits.
    wide = torch.zeros(len(x), 3, 20, dtype=torch.uint8)
    wide[:, :2, :10] = rows
    assert torch.equal(unpacked(wide[:, :2, :10], kv_format, dtype), read)
    for t, h in ((0, 1), (9, 0)):
        assert torch.equal(as_cached(x[t, h][None, None], kv_format)[0, 0], read[t, h])


@pytest.mark.parametrize("kv_format", FORMATS)
def test_what_is_no_number_is_not_hidden(kv_format):
    x = heads()
    x[3, 1, 2], x[5, 0, 0] = torch.nan, torch.inf
    finite = as_cached(x, kv_format).isfinite().all(-1)
    assert (~finite).nonzero().tolist() == [[3, 1], [5, 0]]
    assert not as_cached(torch.zeros_like(x), kv_format).any()


@pytest.mark.parametrize("kv_format", FORMATS)
def test_gradients_are_those_of_what_was_read(kv_format):
    """Straight-through: by finite differences of the rounded keys and values, not rounded again."""
    q, k, v, weight = (heads(8, torch.float32, seed=s).clamp(-2, 2) for s in range(4))
    k, v = k.requires_grad_(), v.requires_grad_()

    def loss(k, v):
        layout = AttentionLayout.packed(LENS)
        out = CpuOperators().attention(q, k, v, layout, ScoreRule(8**-0.5))
        return (out.double() * weight).sum()

    loss(as_cached(k, kv_format), as_cached(v, kv_format)).backward()
    read = [as_cached(x.detach(), kv_format) for x in (k, v)]
    for number, x in enumerate((k, v)):
        place = divmod(int(x.grad.abs().argmax()), 16)
        found = []
        for step in (2**-7, -(2**-7)):
            moved = [each.clone() for each in read]
            moved[number].view(-1, 16)[place] += step
            with torch.no_grad():
                found.append(float(loss(*moved)))
        slope = (found[0] - found[1]) / 2**-6
        assert slope == pytest.approx(float(x.grad.view(-1, 16)[place]), rel=1e-3)
