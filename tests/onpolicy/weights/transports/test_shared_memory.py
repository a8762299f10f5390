"""Memory that several processes open, one after the other and each by handles of its own."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

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
bucket = SharedMemoryTransport().share([("norm", torch.ones(4))])
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
    handles = transport.handles([("norm", torch.ones(4))])
    assert len(handles(engine)) == 2


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
