"""A bucket as bytes and a table: SGLang's own code finds every tensor in it again, bit for bit."""

import importlib.util
import pickle
from importlib.metadata import distribution

import pytest
import torch

from onpolicy.weights import flat

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
    ("odd", numbers(3, dtype=torch.bfloat16)),
    ("wide", numbers(4, 5)),
    ("bytes", torch.arange(7, dtype=torch.uint8)),
    ("scalar", torch.tensor(3, dtype=torch.int64)),
    ("turned", numbers(6, 5, dtype=torch.bfloat16).T),
    ("part", numbers(4, 8)[1:3, 2:5]),
    ("none", torch.empty(0, 3)),
]


def test_sglang_reads_the_tensors_of_any_dtype_and_layout_back_in_place(sglangs):
    ordered = flat.in_order(MIXED)
    data, rows = flat.flatten(ordered), pickle.loads(pickle.dumps(flat.table(ordered)))
    read = dict(sglangs.FlattenedTensorBucket(None, data, rows).reconstruct_tensors())
    assert read.keys() == dict(MIXED).keys()
    for name, tensor in MIXED:
        assert torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
        assert read[name].untyped_storage().data_ptr() == data.data_ptr() or not tensor.numel()


def test_an_engine_that_is_told_names_shapes_and_dtypes_alone_expects_the_same_layout(sglangs):
    ordered = flat.in_order(MIXED)
    told = sglangs.FlattenedTensorBucket(named_tensors=ordered)
    ours = [(row.name, row.start_idx, row.end_idx) for row in flat.table(ordered)]
    assert ours == [(meta.name, meta.start_idx, meta.end_idx) for meta in told.get_metadata()]
    assert torch.equal(flat.flatten(ordered), told.get_flattened_tensor())


def test_in_another_order_a_tensor_could_not_be_read_in_place(sglangs):
    data, rows = flat.flatten(MIXED), flat.table(MIXED)
    with pytest.raises(RuntimeError, match="divisible"):
        sglangs.FlattenedTensorBucket(None, data, rows).reconstruct_tensors()


def test_a_buffer_holds_one_bucket_after_the_other_in_the_same_memory():
    asked = []

    def make(num_bytes):
        asked.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    buffer, ordered = flat.Buffer(make), flat.in_order(MIXED)
    sizes = []
    for bucket in (ordered[:3], ordered, ordered[:2], ordered):
        data = buffer.fill(bucket)
        assert torch.equal(data, flat.flatten(bucket))
        sizes.append(len(data))
    assert asked == sizes[:2]
    buffer.free()
    assert torch.equal(data, flat.flatten(ordered))  # for those who still look at it
    assert torch.equal(buffer.fill(ordered[:1]), flat.flatten(ordered[:1])) and len(asked) == 3
