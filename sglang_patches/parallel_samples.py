"""Gives each of the n samples of one request (`sampling_params.n`) a seed of its own.

Diverges in stock SGLang with deterministic inference: all copies have the request's seed, so n samples
are n times the same. Here the first copy keeps it, and every further one has `next_seed` of the copy
before it. A copy can thus be had alone, by a request with its seed. Can go when SGLang derives seeds for
copies.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from onpolicy.ops.uniform_numbers import splitmix64
from sglang_patches import registry

TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request"


def install() -> None:
    registry.hook(TARGET, _give_seed, "before")


def _give_seed(manager: Any, tokenized: Any, *_: Any, **__: Any) -> None:
    """Copies share their parameters, whose seed is the next one's to be sent."""
    shared = tokenized.sampling_params
    # Ahead of the copies SGLang sends their prompt alone, with parameters of its own. Greedy requests
    # draw nothing, and are left without a seed (request_seeds.py).
    if shared.n == 1 or shared.max_new_tokens == 0 or shared.sampling_seed is None:
        return
    tokenized.sampling_params = copy.copy(shared)
    shared.sampling_seed = next_seed(shared.sampling_seed)


def next_seed(seed: int) -> int:
    """The seed of the copy after the one with `seed`, in [0, 2**63)."""
    return int(splitmix64(torch.tensor(seed))) & ((1 << 63) - 1)
