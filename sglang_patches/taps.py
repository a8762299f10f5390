"""An extension that records what this engine computes, row by row, for `onpolicy explain`.

Every forward pass leaves a file of each tensor-parallel rank in a directory
(`onpolicy.explain.taps.recording`), before any rank answers. While the file `suspect` is there, which
names one call, its tensors are written beside them.
A row is known by the tokens up to it, whichever request computed those.
Source: ModelRunner.forward, sglang/srt/model_executor/model_runner.py.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import torch

from onpolicy.contract import NumericsContract
from onpolicy.explain.taps.evidence import write_evidence
from onpolicy.explain.taps.policy import scopes, tapped
from onpolicy.explain.taps.recorder import Recorder
from onpolicy.explain.taps.recording import SUSPECT, write_calls
from onpolicy.explain.taps.rows import prefix_keys
from onpolicy.ops import Operators
from sglang_patches import registry, stock_taps
from sglang_patches.extensions import Extension
from sglang_patches.tensor_parallel import rank, wait_for_all_ranks

LOAD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


class Taps(Extension):
    """What one process of an engine records, into a directory."""

    def __init__(self, directory: str):
        self.directory, self.recorder = Path(directory), Recorder()
        self._prefixes = Prefixes()
        self._asked, self._passes = "", 0
        self._engine = uuid.uuid4().hex  # those of other hosts write here too

    def around(self, operators: Operators) -> Operators:
        return tapped(operators, self.recorder)

    def install(self, contract: NumericsContract) -> None:
        """Tell the recorder what runs; of an engine without our operators record its own modules."""

        def after_load(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
            self.recorder.rank = rank()
            if contract.is_aligned:
                scopes(runner.model.model, self.recorder)
            else:
                stock_taps.watch(runner.model, self.recorder, contract.row_parallel_blocks)
            return result

        registry.hook(LOAD_TARGET, after_load, "after")
        registry.hook(FORWARD_TARGET, self._forward, "around")

    def _forward(self, original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.input_ids is None or not len(batch.input_ids):
            return original(runner, batch, *args, **kwargs)
        keys, last = self._prefixes.of(runner, batch)
        self._read_suspect()
        self.recorder.open(keys, last)
        try:
            return original(runner, batch, *args, **kwargs)
        finally:
            self._write()

    def _read_suspect(self) -> None:
        file = self.directory / SUSPECT
        asked = file.read_text() if file.exists() else ""
        if asked != self._asked:
            self._asked, self.recorder.evidence = asked, None
            wanted = json.loads(asked) if asked else None
            self.recorder.suspect = wanted and (tuple(wanted["site"]), wanted["key"], rank())

    def _write(self) -> None:
        calls, self._passes = self.recorder.close(), self._passes + 1
        # Ranks may be forked with the engine's name. Of several engines all ranks are in one order, so
        # that of a prefix that several computed one engine's rows are the last, on every rank.
        process = f"{os.getppid()}_{os.getpid()}_{self._engine}"
        write_calls(calls, self.directory / f"{self._passes:08d}_{process}.pass")
        if self.recorder.evidence is not None:
            write_evidence(self.recorder.evidence, self.directory, rank())
            self.recorder.evidence = None
        wait_for_all_ranks()


class Prefixes:
    """The keys of one process's batches, every one of which it must see.

    A prefix may come from the cache, so the key of every cache slot's token is remembered, and a
    sequence goes on from the key of its last cached slot.
    """

    def __init__(self) -> None:
        self._key_of_slot: dict[int, int] = {}

    def of(self, runner: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys of a batch's rows, and the last row of each sequence, which makes logits."""
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
