"""Attention within images: against PyTorch's own with masks, values and gradients, in any company."""

import pytest
import torch
import torch.nn.functional as F

from onpolicy.models.vision.image_attention import BlockAttention, ImageBlock, whole_attention
from onpolicy.ops import AttentionLayout, ScoreRule
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.stock import StockOperators
from onpolicy.ops.triton import TritonOperators

OPERATORS = CpuOperators(1)


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("length", [1, 7, 64, 130])
def test_every_token_sees_all_of_its_image(length):
    q, k, v = (drawn(3, length, 8, seed=i).requires_grad_() for i in range(3))
    found = whole_attention(OPERATORS, q, k, v, 0.3)
    expected = F.scaled_dot_product_attention(q[None], k[None], v[None], scale=0.3)[0]
    assert torch.allclose(found, expected, atol=1e-5)
    grad = drawn(3, length, 8, seed=9)
    own, theirs = (torch.autograd.grad(x, (q, k, v), grad) for x in (found, expected))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(own, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit_of_it(dtype):
    q, k, v = (drawn(4, 70, 16, seed=i, dtype=dtype) for i in range(3))
    one, two = (whole_attention(CpuOperators(n), q, k, v, 0.25) for n in (1, 2))
    assert torch.equal(one, two)


WINDOWS = (None, 6, 64)


def masked(q, k, v, blocks, lens, window):
    """Attention of packed sequences by PyTorch with a mask, as transformers makes it of Gemma-3."""
    total = sum(lens)
    sequence = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    starts = [sum(lens[:i]) for i in range(len(lens))]
    at = torch.arange(total)
    seen = (at[:, None] >= at) & (at[:, None] - at < (window or total))
    image = torch.full((total,), -1)
    for number, block in enumerate(blocks):
        row = starts[block.part] + block.start
        image[row : row + block.end - block.start] = number
    seen |= (image[:, None] == image) & (image[:, None] >= 0)
    seen &= sequence[:, None] == sequence
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(
        0, 1
    )


def corrected(operators, q, k, v, blocks, lens, window):
    scores, layout = ScoreRule(q.shape[-1] ** -0.5, window), AttentionLayout.packed(lens)
    starts = [sum(lens[:i]) for i in range(len(lens))]
    attention = BlockAttention(
        blocks, lambda part, low, high: starts[part] + torch.arange(low, high)
    )
    causal = operators.attention(q, k, v, layout, scores)
    return attention.correct(operators, causal, q, k, v, scores)


@pytest.mark.parametrize("window", WINDOWS)
def test_images_in_a_decoder_see_their_past_and_themselves(window):
    lens = (20, 33)
    blocks = [ImageBlock(0, 3, 3, 8), ImageBlock(1, 20, 0, 4), ImageBlock(1, 20 + 15, 15, 20)]
    q, k, v = (drawn(53, h, 8, seed=h + i).requires_grad_() for i, h in enumerate((4, 2, 2)))
    found = corrected(OPERATORS, q, k, v, blocks, lens, window)
    expected = masked(q, k, v, blocks, lens, window)
    assert torch.allclose(found, expected, atol=1e-5)
    grad = drawn(53, 4, 8, seed=9)
    own, theirs = (torch.autograd.grad(x, (q, k, v), grad) for x in (found, expected))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(own, theirs, strict=True))
    assert not torch.allclose(found, masked(q, k, v, [], lens, window), atol=1e-3)


def test_another_sequence_changes_no_bit():
    q, k, v = (drawn(53, h, 8, seed=h + i) for i, h in enumerate((4, 2, 2)))
    alone = corrected(OPERATORS, q[20:], k[20:], v[20:], [ImageBlock(0, 15, 15, 20)], (33,), 6)
    blocks = [ImageBlock(0, 3, 3, 8), ImageBlock(1, 35, 15, 20)]
    assert torch.equal(corrected(OPERATORS, q, k, v, blocks, (20, 33), 6)[20:], alone)


@pytest.mark.kernels
@pytest.mark.parametrize("window", WINDOWS)
def test_triton_needs_no_kernel_of_its_own(window):
    q, k, v = (drawn(28, h, 16, seed=h + i) for i, h in enumerate((4, 2, 2)))
    given = q, k, v, [ImageBlock(0, 3, 3, 8)], (28,), window
    assert torch.allclose(corrected(TritonOperators(), *given), masked(*given), atol=1e-4)
    images = [drawn(2, 16, 16, seed=i) for i in range(3)]
    both = TritonOperators(), StockOperators()
    found, expected = (whole_attention(operators, *images, 0.25) for operators in both)
    assert torch.allclose(found, expected, atol=1e-4)
