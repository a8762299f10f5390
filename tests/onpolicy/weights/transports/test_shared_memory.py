"""Memory that several processes open by handles of their own, and the bytes that SGLang reads."""

import importlib.util
import os
import pickle
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from onpolicy.weights.transports import shared_memory
from onpolicy.weights.transports.shared_memory import SharedMemoryTransport

OPEN = """
import base64, pickle, sys
bucket = pickle.loads(base64.b64decode(sys.stdin.read()))
data = bucket.pop("flattened_tensor")
for row in bucket["metadata"]:
    tensor = data[row.start_idx : row.end_idx].view(row.dtype).view(row.shape)
    print(f"{row.name}={tensor.sum().item()}", end=" ")
del data, tensor  # and with them this process's reference
"""


SHARE = """
import torch
from onpolicy.weights.transports.shared_memory import SharedMemoryTransport
bucket = SharedMemoryTransport().memory.fill([("norm", torch.ones(4))])
"""


class Engine:
    """Its ranks are processes that open their tensors, read them, and end."""

    url = "an engine"

    def __init__(self, ranks):
        self.ranks, self.read, self.reports = ranks, [], 0

    def report(self):
        self.reports += 1
        return {"tp_size": self.ranks}

    def post(self, path, body, num_bytes):
        assert num_bytes == 16 * 4  # float32
        assert body["load_format"] == "flattened_bucket"
        for payload in body["serialized_named_tensors"]:
            done = subprocess.run(
                [sys.executable, "-c", OPEN], input=payload, capture_output=True, text=True
            )
            self.read.append(done.stdout.strip() or done.stderr)


def test_every_rank_reads_whole_tensors_and_parts_of_one():
    """As the experts of a layer are: parts of one parameter."""
    parts = torch.arange(12.0).view(3, 4).unbind()
    bucket = [("norm", torch.ones(4)), *((f"experts.{e}", part) for e, part in enumerate(parts))]
    engine = Engine(ranks=3)
    transport = SharedMemoryTransport()
    transport.open([engine])
    transport.send(bucket, [engine], "1")
    assert engine.read == ["norm=4.0 experts.0=6.0 experts.1=22.0 experts.2=38.0"] * 3


def test_an_engine_is_asked_for_its_ranks_once_and_again_after_a_push_that_failed():
    engine, transport = Engine(ranks=1), SharedMemoryTransport()
    for _ in range(3):
        transport.open([engine])
    assert engine.reports == 1
    transport.abandon()
    engine.ranks = 2
    transport.open([engine])
    transport.send([("norm", torch.ones(16))], [engine], "1")
    assert engine.read == ["norm=16.0"] * 2


def test_what_a_process_shared_goes_after_it_without_a_word():
    with TemporaryDirectory() as directory:  # with a path short enough for sockets
        # Its standard error is open until the manager, which outlives it, has ended too.
        done = subprocess.run(
            [sys.executable, "-c", SHARE],
            env={**os.environ, "TMPDIR": directory},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert list(Path(directory).iterdir()) == []


FILE = "sglang/srt/weight_sync/tensor_bucket.py"


@pytest.fixture(scope="module")
def sglangs():
    """SGLang's module, alone: it needs torch and nothing else of SGLang's."""
    found = importlib.util.spec_from_file_location(
        "tensor_bucket", str(distribution("sglang").locate_file(FILE))
    )
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def numbers(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


MIXED = [
    ("odd", numbers(3, dtype=torch.bfloat16)), ("wide", numbers(4, 5)),
    ("bytes", torch.arange(7, dtype=torch.uint8)), ("scalar", torch.tensor(3, dtype=torch.int64)),
    ("turned", numbers(6, 5, dtype=torch.bfloat16).T), ("part", numbers(4, 8)[1:3, 2:5]),
    ("none", torch.empty(0, 3)),
]  # fmt: skip


def test_sglang_reads_the_tensors_of_any_dtype_and_layout_back_in_place(sglangs):
    ordered = shared_memory.in_order(MIXED)
    data, rows = (
        shared_memory.flatten(ordered),
        pickle.loads(pickle.dumps(shared_memory.table(ordered))),
    )
    read = dict(sglangs.FlattenedTensorBucket(None, data, rows).reconstruct_tensors())
    assert read.keys() == dict(MIXED).keys()
    for name, tensor in MIXED:
        assert torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
        assert read[name].untyped_storage().data_ptr() == data.data_ptr() or not tensor.numel()


def test_an_engine_that_is_told_names_shapes_and_dtypes_alone_expects_the_same_layout(sglangs):
    ordered = shared_memory.in_order(MIXED)
    told = sglangs.FlattenedTensorBucket(named_tensors=ordered)
    ours = [(row.name, row.start_idx, row.end_idx) for row in shared_memory.table(ordered)]
    assert ours == [(meta.name, meta.start_idx, meta.end_idx) for meta in told.get_metadata()]
    assert torch.equal(shared_memory.flatten(ordered), told.get_flattened_tensor())


def test_a_buffer_holds_one_bucket_after_the_other_in_the_same_memory():
    asked = []

    def make(num_bytes):
        asked.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    buffer, ordered = shared_memory.Buffer(make), shared_memory.in_order(MIXED)
    sizes = []
    for bucket in (ordered[:3], ordered, ordered[:2], ordered):
        data = buffer.fill(bucket)
        assert torch.equal(data, shared_memory.flatten(bucket))
        sizes.append(len(data))
    assert asked == sizes[:2]
    buffer.free()
    assert torch.equal(data, shared_memory.flatten(ordered))  # for those who still look at it
    assert (
        torch.equal(buffer.fill(ordered[:1]), shared_memory.flatten(ordered[:1]))
        and len(asked) == 3
    )
