"""Records what this engine computes, row by row, for `onpolicy explain`; without it nothing is hooked.

ONPOLICY_TAPS names a directory. Every forward pass leaves a file there (`onpolicy.taps.recording`).
While the file `suspect` is there, which names one call, its tensors are written beside them.
Rows are known by their prefixes. A prefix may come from the cache, so the key of every cache slot's
token is remembered, and a sequence goes on from that of its last cached slot.
Source: ModelRunner.forward, sglang/srt/model_executor/model_runner.py.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from onpolicy.ops import Operators
from onpolicy.taps.door import scopes, tapped
from onpolicy.taps.evidence import write_evidence
from onpolicy.taps.recorder import Recorder
from onpolicy.taps.recording import SUSPECT, write_calls
from onpolicy.taps.rows import prefix_keys
from sglang_patches import registry, stock_taps
from sglang_patches.tensor_parallel import rank

LOAD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


class Taps:
    """What one process of an engine records."""

    def __init__(self, directory: Path):
        self.directory, self.recorder = directory, Recorder()
        self._hooks = ExitStack()  # for as long as the process lives
        self._key_of_slot: dict[int, int] = {}
        self._asked, self._passes = "", 0

    def behind(self, operators: Operators) -> Operators:
        return tapped(operators, self.recorder)

    def install(self, *, is_aligned: bool) -> None:
        """After the patches that put operators into the model."""

        def after_load(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
            if is_aligned:
                self._hooks.enter_context(scopes(runner.model.model, self.recorder))
            else:
                stock_taps.watch(runner.model, self.recorder)
            return result

        registry.hook(LOAD_TARGET, after_load, "after")
        registry.hook(FORWARD_TARGET, self._forward, "around")

    def _forward(self, original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.input_ids is None or not len(batch.input_ids):
            return original(runner, batch, *args, **kwargs)
        keys, last = self._keys(runner, batch)
        self._read_suspect()
        self.recorder.open(keys, last)
        try:
            return original(runner, batch, *args, **kwargs)
        finally:
            self._write()

    def _keys(self, runner: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of the rows of a batch, and the last row of each sequence, whose logits are wanted."""
        ends = batch.seq_lens.tolist()
        decodes = batch.forward_mode.is_decode()
        counts = [1] * len(ends) if decodes else [int(n) for n in batch.extend_seq_lens]
        slots = runner.req_to_token_pool.req_to_token
        keys: list[int] = []
        tokens, locations = batch.input_ids.tolist(), batch.out_cache_loc.tolist()
        for request, end, count in zip(batch.req_pool_indices.tolist(), ends, counts, strict=True):
            start, first = end - count, len(keys)
            before = self._key_of_slot.get(int(slots[request, start - 1]), 0) if start else 0
            keys += prefix_keys(tokens[first : first + count], before)
        self._key_of_slot.update(zip(locations, keys, strict=False))
        return torch.tensor(keys), torch.tensor(counts).cumsum(0) - 1

    def _read_suspect(self) -> None:
        file = self.directory / SUSPECT
        asked = file.read_text() if file.exists() else ""
        if asked != self._asked:
            self._asked, self.recorder.evidence = asked, None
            wanted = json.loads(asked) if asked else None
            self.recorder.suspect = wanted and (tuple(wanted["site"]), wanted["key"])

    def _write(self) -> None:
        calls, self._passes = self.recorder.close(), self._passes + 1
        if rank():
            return
        write_calls(calls, self.directory / f"{self._passes:08d}_{os.getpid()}.pass")
        if self.recorder.evidence is not None:
            write_evidence(self.recorder.evidence, self.directory)
            self.recorder.evidence = None
