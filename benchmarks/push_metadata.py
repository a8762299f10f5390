"""CPU seconds of a push for names, shapes and offsets: Qwen3-30B-A3B on the meta device.

There are no bytes, so nothing is copied or hashed: the rest grows with the number of tensors
(18,867), on the sending and on the receiving side, and is measured by the functions that a push
calls.
"""

from __future__ import annotations

import base64
import json
import pickle
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from onpolicy.compat.process import collect_rarely
from onpolicy.models.stored import stored_tensors
from onpolicy.weights.digest import WeightBucket, in_buckets
from onpolicy.weights.transports import shared_memory
from onpolicy.weights.transports.broadcast import described
from sglang_patches.engine_experts import _destinations

T = TypeVar("T")

BUCKET = 512 << 20

SIZES: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "decoder_sparse_step": 1, "norm_topk_prob": True, "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}  # fmt: skip
"""The sizes of Qwen/Qwen3-30B-A3B."""


def measure() -> dict[str, Any]:
    """Return CPU seconds by part and in all, and the extra seconds of the first push; for a push
    through memory, which makes a handle of each bucket, and for a broadcast in its place."""
    collect_rarely()  # as ranks and servers do
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES), dtype=torch.bfloat16)
    first = {
        "trainer": _timed(lambda: list(_buckets(model)))[0],
        "engine": _timed(lambda: _destinations(model))[0],
    }
    gathering, cuts = _timed(lambda: list(_buckets(model)))
    sharing, handles = _timed(lambda: [_handle(shared_memory.in_order(bucket)) for bucket in cuts])
    reading, read = _timed(lambda: [_read(handle) for handle in handles])
    seconds = {
        "cut out": gathering,
        "laid out, and a handle made": sharing,
        "read by the engine": reading,
        "found in its model": _timed(lambda: [_find(model, bucket) for bucket in read])[0],
    }
    return {
        "model": "Qwen3-30B-A3B",
        "tensors": sum(map(len, cuts)),
        "buckets": len(cuts),
        "cpu_seconds": seconds,
        "cpu_seconds_in_all": sum(seconds.values()),
        "of_a_broadcast": _timed(lambda: [_body(bucket) for bucket in cuts])[0],
        "of_the_first_push": first,
    }


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    started = time.process_time()
    made = work()
    return time.process_time() - started, made


def _buckets(model: Any) -> Iterator[WeightBucket]:
    parameters = model.named_parameters()
    stored = (stored_tensors(model, name, each.detach()).items() for name, each in parameters)
    return in_buckets(chain.from_iterable(stored), BUCKET)


def _handle(bucket: WeightBucket) -> str:
    shared_memory.as_bytes(bucket)
    return base64.b64encode(pickle.dumps(shared_memory.table(bucket))).decode()


def _body(bucket: WeightBucket) -> str:
    return json.dumps(described(shared_memory.in_order(bucket)))


def _read(handle: str) -> WeightBucket:
    rows = pickle.loads(base64.b64decode(handle))
    data = torch.empty(rows[-1].end_idx, dtype=torch.uint8, device="meta")
    return [
        (row.name, data[row.start_idx : row.end_idx].view(row.dtype).reshape(row.shape))
        for row in rows
    ]


def _find(model: Any, bucket: WeightBucket) -> None:
    """Look up a bucket's tensors as the engine does to load it, and again to compare the stored
    bits."""
    names, parts, _ = _destinations(model)
    for name, tensor in bucket:
        if (key := f"model.{name}") in parts:
            parts[key].copy_(tensor.view_as(parts[key]))
        else:
            assert key in names
    held = _destinations(model).held
    assert all(held[f"model.{name}"].shape == tensor.shape for name, tensor in bucket)
