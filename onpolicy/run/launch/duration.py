"""The least time of a command: its operations over this device's measured speed of matrix products.

A rough estimate, to tell minutes from hours. The parts left out (starting the engines, attention,
pushes) take a minute or two on small models.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onpolicy.models.size import ModelSize
from onpolicy.outputs.console import duration

logger = logging.getLogger(__name__)

FORWARD = 2
"""The operations of a forward pass for each parameter and token."""

STEP = 4 * FORWARD
"""The operations of a training step: forward, recomputed forward, and a backward pass of twice that."""

ROWS = 256
GPU_ROWS = 8192
SECONDS = 0.3

MOST_SAMPLED_PER_SECOND = 4000
"""The most tokens that a CPU server samples in a second, limited by scheduler and sampler however small
the model is; the highest rate in benchmarks/README.md is 3,545."""


@dataclass(frozen=True, slots=True)
class Work:
    """The computation of a command, in tokens that go through the model."""

    scored: int
    """The number of tokens prefilled by the server, or scored by the trainer."""

    trained: int
    decode_steps: int
    """The number of decode steps, each of which reads all weights for up to ROWS tokens."""

    sampled: int
    """The number of tokens sampled by the server that samples most."""

    def operations(self, size: ModelSize) -> float:
        """Return the number of floating-point operations.

        A decode step is limited by memory and counts as much as ROWS / 4 tokens.
        """
        tokens = FORWARD * (self.scored + ROWS // 4 * self.decode_steps) + STEP * self.trained
        return float(size.parameters) * tokens

    def seconds(self, size: ModelSize, operations_per_second: float, device: str) -> float:
        """Return the least time in seconds."""
        sampling = self.sampled / MOST_SAMPLED_PER_SECOND if device == "cpu" else 0.0
        return sampling + self.operations(size) / operations_per_second


def verify_work(
    prompt_lens: Sequence[int], max_new_tokens: int, trained: int, at_once: int
) -> Work:
    """Return the work of two rounds, each with prefill and scoring of all sequences, and of a step on
    the first `trained` sequences."""
    lens = [n + max_new_tokens for n in prompt_lens]
    waves = -(-len(lens) // max(1, at_once))
    return Work(
        scored=2 * (sum(prompt_lens) + sum(lens)),
        trained=sum(lens[:trained]),
        decode_steps=2 * waves * max_new_tokens,
        sampled=2 * len(lens) * max_new_tokens,
    )


def say_how_long(work: Work, size: ModelSize, device: str) -> None:
    """Log the least time of a command, and its parts."""
    speed = operations_per_second(size, device)
    logger.info(
        "at least %s: %.1e operations (%d tokens prefilled or scored, %d trained on, %d decode steps) "
        "at %.1e a second, and %d tokens to sample, besides starting the engines",
        duration(work.seconds(size, speed, device)), work.operations(size), work.scored, work.trained,
        work.decode_steps, speed, work.sampled,
    )  # fmt: skip


def operations_per_second(size: ModelSize, device: str) -> float:
    """Measure the speed of matrix products of the model's width, in operations per second.

    On a CPU in float32, on a GPU in bfloat16 with enough rows to fill it.
    """
    rows, dtype = (ROWS, torch.float32) if device == "cpu" else (GPU_ROWS, torch.bfloat16)
    x = torch.ones(rows, size.hidden, device=device, dtype=dtype)
    weight = torch.ones(2 * size.hidden, size.hidden, device=device, dtype=dtype)
    (x @ weight.t())[0, 0].item()  # loads the library
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < SECONDS:
        (x @ weight.t())[0, 0].item()  # waits for a GPU
        done += 1
    return done * 2.0 * rows * weight.numel() / spent
