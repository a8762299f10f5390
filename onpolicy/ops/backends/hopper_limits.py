"""What the kernels of the Hopper operators compute row by row; see docs/bitwise_parity.md."""

from __future__ import annotations

FLASH_HEAD_DIMS = (96, 128, 192, 256)
"""Head sizes for which FlashAttention-3 sums over keys in blocks of one width, however few queries
there are, with a page table (kernels of sglang-kernel 0.4.5 and 0.4.7). With 64 it takes blocks of
192 keys for few queries and of 128 for many; other sizes are padded to one of these."""

GEMM_COLUMNS = 16
"""DeepGEMM multiplies by weights whose out features are a multiple of this, its narrowest tile."""
