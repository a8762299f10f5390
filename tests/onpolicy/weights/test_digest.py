import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.weights.digest import WeightDigest, in_buckets

WEIGHTS = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}


def digest(items):
    result = WeightDigest()
    for name, tensor in items:
        result.add(name, tensor)
    return result.hexdigest()


def test_order_does_not_matter():
    items = list(WEIGHTS.items())
    assert digest(items) == digest(reversed(items))


def test_a_tensor_added_again_replaces_the_earlier_one():
    assert digest([("a", torch.zeros(2)), *WEIGHTS.items()]) == digest(WEIGHTS.items())


def test_layout_in_memory_does_not_matter():
    moved = {**WEIGHTS, "a": WEIGHTS["a"].t().contiguous().t()}
    assert digest(moved.items()) == digest(WEIGHTS.items())


def test_one_bit_a_name_a_shape_or_a_dtype_changes_it():
    flipped = WEIGHTS["a"].clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    others = [
        {**WEIGHTS, "a": flipped},
        {"c": WEIGHTS["a"], "b": WEIGHTS["b"]},
        {**WEIGHTS, "a": WEIGHTS["a"].view(4, 3)},
        {**WEIGHTS, "a": WEIGHTS["a"].view(torch.int32)},
        {"a": WEIGHTS["a"]},
    ]
    digests = {digest(other.items()) for other in [WEIGHTS, *others]}
    assert len(digests) == len(others) + 1


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 12))
def test_buckets_hold_all_in_order_and_exceed_their_size_by_one_tensor_alone(sizes, most):
    tensors = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    buckets = list(in_buckets(tensors, most))
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in tensors]
    held = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets]
    pairs = list(zip(buckets, held, strict=True))
    assert all(bucket and (size <= most or len(bucket) == 1) for bucket, size in pairs)
    followers = zip(held, buckets[1:], strict=False)
    assert all(size + following[0][1].nbytes > most for size, following in followers)
