"""The sizes in which attention on a CPU cuts keys and query rows; the first two decide bits."""

from __future__ import annotations

from onpolicy.contract import ATTENTION_CHUNK

KEY_CHUNK = ATTENTION_CHUNK

KEY_BLOCK = 64
"""Keys of one product with values; a chunk's sum goes through its blocks in order."""

ROW_MULTIPLE = 16
"""The size from which a single-threaded GEMM gives a row the same bits whatever rows surround it."""
