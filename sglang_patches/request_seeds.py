"""Gives a sampled request without a seed one of its own.

SGLang's deterministic inference takes the same seed, 42, for every request that brings none, so two
people who ask the same get the same "sample". Here the n-th such request gets the n-th number of a
generator that the server's --random-seed starts (`onpolicy serve --seed`): answers differ, and a server
that is started and asked again in the same order gives the same ones.
Source: sglang/srt/sampling/sampling_batch_info.py. Can go when SGLang draws seeds itself.
"""

from __future__ import annotations

import random
from typing import Any

from sglang_patches import registry

TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"

_GREEDY = 1
"""SGLang's top_k of a request of temperature 0; health checks are such requests."""


def install() -> None:
    registry.hook(TARGET, SeedGiver(), "after")


class SeedGiver:
    """A hook for the one process that all requests of a server come through."""

    def __init__(self) -> None:
        self._generator: random.Random | None = None

    def __call__(self, tokenized: Any, manager: Any, *_: Any, **__: Any) -> Any:
        params = tokenized.sampling_params
        if params.sampling_seed is None and params.top_k != _GREEDY:
            if self._generator is None:
                self._generator = random.Random(manager.server_args.random_seed)
            params.sampling_seed = self._generator.getrandbits(63)
        return tokenized
