"""Extension of a server that records an engine's computation, row by row, for `onpolicy explain`.

Every forward pass leaves a file of each tensor-parallel rank in a directory
(`onpolicy.explain.taps.recorder`), before any rank answers. While the file `suspect` is there,
which names one call, its tensors are written beside them. The key of a row is its token prefix,
whichever request computed it.

In an engine without our operators its own modules are recorded, under the names of Hugging Face's.
SGLang fuses projections that share an input, and a norm with the addition before it. Fused results
are split by the sizes in their layers, so that the trainer's rows have counterparts.

Source: ModelRunner.forward, sglang/srt/model_executor/model_runner.py; sglang/srt/models/qwen3.py
and its kin; sglang/srt/layers/{linear,layernorm,activation}.py.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onpolicy.contract import NumericsContract
from onpolicy.explain.taps.attachment import scopes, tapped
from onpolicy.explain.taps.evidence import Scope, write_evidence
from onpolicy.explain.taps.recorder import HEAD, SUSPECT, Recorder, write_calls
from onpolicy.explain.taps.row_keys import prefix_keys
from onpolicy.ops import Operators
from sglang_patches import registry
from sglang_patches.engine_ranks import rank, summed, wait_for_all_ranks
from sglang_patches.extensions import Extension

LOAD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.forward"

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's names of fused layers, and Hugging Face's names of their parts."""

MIXTRAL = "block_sparse_moe"
"""SGLang's name of the module that transformers 5 calls `mlp` here, too."""

Record = tuple[str, str, Sequence[Tensor], Sequence[Tensor]]
"""The arguments of `Recorder.add` for a site."""

Describe = Callable[[Any, Any], list[Record]]
"""A function from (arguments, output) of a module's pass to its records."""


class Taps(Extension):
    """A recorder of one process of an engine, writing into a directory."""

    def __init__(self, directory: str):
        self.directory, self.recorder = Path(directory), Recorder()
        self._prefixes = Prefixes()
        self._asked, self._passes = "", 0
        self._engine = uuid.uuid4().hex  # engines of other hosts write here too

    def around(self, operators: Operators) -> Operators:
        return tapped(operators, self.recorder)

    def install(self, contract: NumericsContract) -> None:
        """Have the recorder follow the running modules: ours, or the engine's own."""

        def after_load(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
            self.recorder.rank = rank()
            if contract.is_aligned:
                scopes(runner.model.model, self.recorder)
            else:
                watch_stock(runner.model, self.recorder, contract.row_parallel_blocks)
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
        # Ranks may be forked with the engine's name. All ranks order the files of several engines alike,
        # so for a prefix that several engines computed, the last rows are one engine's on every rank.
        process = f"{os.getppid()}_{os.getpid()}_{self._engine}"
        write_calls(calls, self.directory / f"{self._passes:08d}_{process}.pass")
        if self.recorder.evidence is not None:
            write_evidence(self.recorder.evidence, self.directory, rank())
            self.recorder.evidence = None
        wait_for_all_ranks()


class Prefixes:
    """The map from each row of a process's batches, all of which it sees, to its prefix's key.

    A prefix may come from the cache, so the key of every cache slot's token is remembered, and a
    sequence goes on from the key of its last cached slot.
    """

    def __init__(self) -> None:
        self._key_of_slot: dict[int, int] = {}

    def of(self, runner: Any, batch: Any) -> tuple[Tensor, Tensor]:
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


def watch_stock(model: Any, recorder: Recorder, blocks: int) -> None:
    """Record a model of SGLang's own from now on; a module of an unknown kind is left out.

    blocks: the blocks of the trainer's sums, which decide the names of row-parallel linears.
    """
    for name, module in model.named_modules():
        if (known := name.removeprefix("model.")) != name:
            _watch(known.replace(MIXTRAL, "mlp"), module, recorder, blocks)
    _watch_head(model, recorder)


def _watch(name: str, module: Any, recorder: Recorder, blocks: int) -> None:
    parent, _, own = name.rpartition(".")
    if own == "self_attn":
        recorder.scoped(module, lambda *_: Scope(module=name))
    kinds = {base.__name__ for base in type(module).__mro__}
    shares_sum = blocks > 1 and "RowParallelLinear" in kinds
    linear = "row_parallel_linear" if shares_sum else "linear"
    # One rotary module serves all layers, so the running layer's attention is asked for its name.
    by_kind: dict[str, Describe] = {
        "VocabParallelEmbedding": lambda args, out: [("embed_tokens", "embedding", (), (out,))],
        "LinearBase": lambda args, out: _linear(name, linear, module, args, out[0]),
        "RMSNorm": lambda args, out: [_norm(name, args, out)],
        "SiluAndMul": lambda args, out: [(parent, "gated", args[0].chunk(2, -1), (out,))],
        "RotaryEmbedding": lambda args, out: [(recorder.module, "rotary", args[1:3], out)],
        "RadixAttention": lambda args, out: [(parent, "attention", args[:1], (out,))],
    }
    for describe in (describe for kind, describe in by_kind.items() if kind in kinds):
        _on_output(module, recorder, describe)


def _linear(name: str, operator: str, module: Any, args: Any, out: Tensor) -> list[Record]:
    parent, _, own = name.rpartition(".")
    # Without `reduce_results` SGLang adds up the ranks' parts later, between modules.
    if not getattr(module, "reduce_results", True):
        out = summed(out)
    if own not in FUSED:
        return [(name, operator, args[:1], (out,))]
    parts = zip(FUSED[own], out.split(list(module.output_partition_sizes), -1), strict=True)
    return [(f"{parent}.{site}", "linear", args[:1], (part,)) for site, part in parts]


def _norm(name: str, args: Any, out: Any) -> Record:
    """Return the record of a norm; one that adds first also returns the sum, which is its input."""
    normed, given = out if isinstance(out, tuple) else (out, args[0])
    return name, "rms_norm", (given,), (normed,)


def _on_output(module: nn.Module, recorder: Recorder, describe: Describe) -> None:
    """Record each pass of a module; a kernel may write over its arguments, so copy them before."""
    before: list[Any] = []

    def keep(_: nn.Module, args: Any) -> None:
        if recorder.is_open:
            before.append(tuple(a.clone() if isinstance(a, Tensor) else a for a in args))

    def record(_: nn.Module, args: Any, out: Any) -> None:
        if before:
            for site in describe(before.pop(), out):
                recorder.add(*site)

    module.register_forward_pre_hook(keep)
    module.register_forward_hook(record)


def _watch_head(model: Any, recorder: Recorder) -> None:
    """Record the head: the logits processor selects rows and projects them itself."""
    processor = model.logits_processor
    compute = processor._compute_lm_head

    def watched(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = compute(hidden, *args, **kwargs)
        size = args[0].org_vocab_size  # SGLang pads the vocabulary
        recorder.add(HEAD, "linear", (hidden,), (logits[:, :size],))
        return logits

    processor._compute_lm_head = watched
