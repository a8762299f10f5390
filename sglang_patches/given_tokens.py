"""An extension by which an engine answers with given responses, sampled as ever but for the token that
is taken.

For `onpolicy explain --attribution`, which compares engines under several contracts on the same tokens:
each prefills in chunks, decodes in batches, and computes its log-probabilities in its own sampler; then
the token that it drew is overwritten by the given one, before the log-probability is looked up.
They are in a JSON file of [prompt, response] pairs of token ids; while there is none, when the server
starts, nothing is hooked.
Source: OutputLogprobProcessor.compute_logprobs, sglang/srt/layers/logprob_processor.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from onpolicy.contract import NumericsContract
from onpolicy.explain.taps.rows import prefix_keys
from sglang_patches import registry
from sglang_patches.extensions import Extension
from sglang_patches.prefixes import Prefixes

FORWARD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
TARGET = "sglang.srt.layers.logprob_processor.OutputLogprobProcessor.compute_logprobs"


class GivenTokens(Extension):
    """The token that follows each prefix of the sequences in a file."""

    def __init__(self, file: str):
        self._next: dict[int, int] = {}
        pairs = json.loads(Path(file).read_text()) if Path(file).exists() else []
        for prompt, response in pairs:
            keys = prefix_keys([*prompt, *response])
            self._next.update(zip(keys[len(prompt) - 1 :], response, strict=False))
        self._prefixes, self._wanted = Prefixes(), list[int | None]()

    def install(self, contract: NumericsContract) -> None:
        if self._next:
            registry.hook(FORWARD_TARGET, self.watch, "before")
            registry.hook(TARGET, self.overwrite, "before")

    def watch(self, runner: Any, batch: Any, *_: Any, **__: Any) -> None:
        """Before a forward pass: what its sequences are to go on with; None: whatever is drawn."""
        self._wanted = []
        if batch.input_ids is not None and len(batch.input_ids):
            keys, last = self._prefixes.of(runner, batch)
            self._wanted = [self._next.get(key) for key in keys[last].tolist()]

    def overwrite(
        self,
        _: Any,
        log_probs: Tensor,
        top_numbers: Any,
        token_ids: Any,
        drawn: Tensor,
    ) -> None:
        """Between the draw and the look-up of its log-probability: drawn, int [B], is written over."""
        for row, token in enumerate(self._wanted):
            if token is not None:
                drawn[row] = token
