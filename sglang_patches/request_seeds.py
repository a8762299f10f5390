"""Seeds for sampled requests without one, and for each sample of one request.

SGLang's deterministic inference takes the same seed, 42, for every request that brings none, so two
people who ask the same get the same "sample". Here the n-th such request gets the n-th number of a
generator seeded with the server's --random-seed (`onpolicy serve --seed`): answers differ, and a
server that is restarted and asked in the same order gives the same ones.

SGLang also gives all n copies of a request (`sampling_params.n`) its seed, so all n samples are
equal. Here the first copy keeps it, and every further one has `next_seed` of the copy before it. A
copy can thus be had alone, by a request with its seed.

Source: sglang/srt/sampling/sampling_batch_info.py. Can go when SGLang draws seeds itself, and
derives them for copies.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch

from onpolicy.ops.uniform_numbers import splitmix64
from sglang_patches import registry

TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"
SEND_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request"

_GREEDY = 1
"""SGLang's top_k of a request of temperature 0; health checks are such requests."""


def install() -> None:
    registry.hook(TARGET, SeedGiver(), "after")
    registry.hook(SEND_TARGET, _give_copies_seeds, "before")


class SeedGiver:
    """A hook for the one process that all requests of a server pass through."""

    def __init__(self) -> None:
        self._generator: random.Random | None = None

    def __call__(self, tokenized: Any, manager: Any, *_: Any, **__: Any) -> Any:
        params = tokenized.sampling_params
        if params.sampling_seed is None and params.top_k != _GREEDY:
            if self._generator is None:
                self._generator = random.Random(manager.server_args.random_seed)
            params.sampling_seed = self._generator.getrandbits(63)
        return tokenized


def _give_copies_seeds(manager: Any, tokenized: Any, *_: Any, **__: Any) -> None:
    """Give each copy its seed: copies share their parameters, whose seed is set for the next one
    sent."""
    shared = tokenized.sampling_params
    # Ahead of the copies SGLang sends their prompt alone, with parameters of its own. Greedy requests
    # draw nothing, and are left without a seed.
    if shared.n == 1 or shared.max_new_tokens == 0 or shared.sampling_seed is None:
        return
    tokenized.sampling_params = copy.copy(shared)
    shared.sampling_seed = next_seed(shared.sampling_seed)


def next_seed(seed: int) -> int:
    """Return the seed of the copy after the one with `seed`, in [0, 2**63)."""
    return int(splitmix64(torch.tensor(seed))) & ((1 << 63) - 1)
