"""Device and sizes of the suite: a GPU, or a rehearsal of its code on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.support.gpu.shapes import MODELS, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sizes of the sweeps, and the device."""

    device: str
    control_dtype: torch.dtype
    """A dtype in which the device's stock GEMM is known to depend on the number of rows."""
    models: tuple[ModelShape, ...]
    """Models whose linears are swept."""
    row_counts: tuple[int, ...]
    """Numbers of rows M of a call, the largest last: every other one is compared with it."""
    few_row_counts: tuple[int, ...]
    """A few of them, for sweeps over something else."""
    three_row_counts: tuple[int, ...]
    """Fewer still, where each one has DeepGEMM compile a kernel for seconds."""
    vocab: int
    norm_sizes: tuple[int, ...]
    head_dims: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    """Numbers of sequences that decode at once."""
    longest: int
    """Tokens of the longest sequence."""
    several_chunks: int
    """Tokens of a sequence whose keys attention sums in several chunks, on every backend."""
    page_sizes: tuple[int, ...]
    small_model: ModelShape
    """The model that generates and is trained, end to end; with experts and without."""
    longest_prompt: int
    generated: int
    """Tokens generated per sequence, end to end."""
    sequences: int
    """Sequences generated at once, end to end."""
    training_steps: int
    graph_steps: int
    """Replays of a decoding step in a CUDA graph."""
    graph_starts: tuple[int, ...]
    """Tokens at which they start: in the first chunk of keys, and just before its end."""


def _around_powers_of_two(first, last):
    powers = range(first.bit_length() - 1, last.bit_length())
    around = {(1 << p) + d for p in powers for d in (-1, 0, 1)}
    return {m for m in around if first <= m <= last}


GPU = Setting(
    device="cuda",
    control_dtype=torch.bfloat16,
    models=tuple(MODELS.values()),
    row_counts=tuple(sorted({*range(1, 131), 200, 1000, 3000} | _around_powers_of_two(128, 4096))),
    few_row_counts=(1, 2, 7, 16, 33, 64, 100, 128, 129, 256, 1000, 1024),
    three_row_counts=(1, 64, 1000),
    vocab=151936,
    norm_sizes=(128, 1024, 2048, 2560, 4096),
    head_dims=(64, 128, 256),
    batch_sizes=(1, 2, 3, 8, 33, 64, 256),
    longest=1500,
    several_chunks=4500,
    page_sizes=(1, 16, 64, 128),
    small_model=ModelShape(
        name="small",
        hidden=256,
        layers=3,
        heads=8,
        kv_heads=2,
        intermediate=512,
        vocab=1009,
        experts=16,
        experts_per_token=4,
    ),
    longest_prompt=130,
    generated=48,
    sequences=24,
    training_steps=3,
    graph_steps=40,
    graph_starts=(100, 2030),
)

REHEARSAL = Setting(
    device="cpu",
    control_dtype=torch.float32,
    models=(
        ModelShape(name="tiny", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16,
                   intermediate=96, vocab=137),
        ModelShape(name="tiny-experts", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16,
                   intermediate=32, vocab=137, experts=8, experts_per_token=2),
    ),
    row_counts=(1, 2, 5, 16, 17, 40),
    few_row_counts=(1, 3, 20),
    three_row_counts=(1, 20),
    vocab=137,
    norm_sizes=(64,),
    head_dims=(16,),
    batch_sizes=(1, 3),
    longest=70,
    several_chunks=1030,
    page_sizes=(1, 16),
    small_model=ModelShape(
        name="small", hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=64,
        vocab=137, experts=4, experts_per_token=2,
    ),
    longest_prompt=52,
    generated=3,
    sequences=3,
    training_steps=1,
    graph_steps=2,
    graph_starts=(100, 511),
)  # fmt: skip
