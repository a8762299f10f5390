"""How long `onpolicy verify` will take: its operations over the speed of a product on this device.

A rough sum, to tell minutes from hours. What it leaves out (starting the engines, attention, pushes)
takes a minute or two on small models.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onpolicy.models.size import ModelSize

FORWARD = 2
"""Operations of a forward pass for each parameter and token."""

STEP = 4 * FORWARD
"""Of a training step: forward, forward again from the layers' inputs, and twice that backward."""

ROWS = 256
SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Work:
    """What a command computes, in tokens that go through the model."""

    scored: int
    """Prefilled by the server, or scored by the trainer."""

    trained: int
    decode_steps: int
    """Of the server, each of which reads all weights for up to ROWS tokens."""

    def operations(self, size: ModelSize) -> float:
        """Floating-point operations; a step costs what ROWS tokens cost, since it waits for memory."""
        tokens = FORWARD * (self.scored + ROWS // 4 * self.decode_steps) + STEP * self.trained
        return float(size.parameters) * tokens


def verify_work(
    prompt_lens: Sequence[int], max_new_tokens: int, trained: int, at_once: int
) -> Work:
    """Of two rounds: prefill and scoring of all sequences each, and a step on the first `trained`."""
    lens = [n + max_new_tokens for n in prompt_lens]
    waves = -(-len(lens) // max(1, at_once))
    return Work(
        scored=2 * (sum(prompt_lens) + sum(lens)),
        trained=sum(lens[:trained]),
        decode_steps=2 * waves * max_new_tokens,
    )


def operations_per_second(size: ModelSize, device: str) -> float:
    """Of float32 products of the model's width, measured for a moment."""
    x = torch.ones(ROWS, size.hidden, device=device)
    weight = torch.ones(2 * size.hidden, size.hidden, device=device)
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < SECONDS:
        (x @ weight.t())[0, 0].item()  # waits for a GPU
        done += 1
    return done * 2.0 * ROWS * weight.numel() / spent
