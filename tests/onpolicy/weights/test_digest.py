import torch

from onpolicy.weights.digest import WeightDigest

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
