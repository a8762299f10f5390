import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.weights import digest
from onpolicy.weights.digest import WeightDigest, in_buckets
from tests.support.weight_digests import digest_of

WEIGHTS = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}


def hexdigest_of(items):
    result = WeightDigest()
    for name, tensor in items:
        result.add(name, tensor)
    return result.hexdigest()


def test_order_does_not_matter():
    items = list(WEIGHTS.items())
    assert hexdigest_of(items) == hexdigest_of(reversed(items))


def test_a_tensor_added_again_replaces_the_earlier_one():
    assert hexdigest_of([("a", torch.zeros(2)), *WEIGHTS.items()]) == hexdigest_of(WEIGHTS.items())


def test_layout_in_memory_does_not_matter():
    moved = {**WEIGHTS, "a": WEIGHTS["a"].t().contiguous().t()}
    assert hexdigest_of(moved.items()) == hexdigest_of(WEIGHTS.items())


def test_one_bit_a_name_a_shape_or_a_dtype_changes_it():
    flipped = WEIGHTS["a"].clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    others = [
        {**WEIGHTS, "a": flipped}, {"c": WEIGHTS["a"], "b": WEIGHTS["b"]},
        {**WEIGHTS, "a": WEIGHTS["a"].view(4, 3)},
        {**WEIGHTS, "a": WEIGHTS["a"].view(torch.int32)}, {"a": WEIGHTS["a"]},
    ]  # fmt: skip
    digests = {hexdigest_of(other.items()) for other in [WEIGHTS, *others]}
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


SEEDS = (0, 1, 0x0123456789ABCDEF, (1 << 64) - 1)
LENGTHS = (1025, 1026, 1088, 1089, 2047, 2048, 2049, 3000, 16 * 1024 + 5, 18 * 1024, 40_000)
"""In bytes: one byte after a block, whole stripes and blocks, and more blocks than are loaded ahead."""


def random_bytes(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (length,), generator=generator, dtype=torch.uint8)


def device_hashes(tensors):
    """As a GPU hashes them: {name: (uint8 [bytes], seed)}"""
    hashes = {}
    device = digest.DeviceHashes(hashes)
    for name, (data, seed) in tensors.items():
        device.add(name, data, seed)
    device.finish()
    return hashes


def library_hash(data, seed):
    return xxhash.xxh3_64_intdigest(data.numpy().data, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_tensors_of_any_length_have_the_librarys_hashes(seed):
    tensors = {f"{n} bytes": (random_bytes(n, n), seed) for n in LENGTHS}
    assert device_hashes(tensors) == {name: library_hash(*data) for name, data in tensors.items()}


@settings(max_examples=15, deadline=None)
@given(st.integers(1025, 4000), st.integers(0, (1 << 64) - 1), st.integers(0, 99))
def test_and_for_any_seed_and_numbers(length, seed, numbers):
    data = random_bytes(length, numbers)
    assert device_hashes({"a": (data, seed)}) == {"a": library_hash(data, seed)}


def test_large_words_overflow_as_they_do_in_the_library():
    data = torch.full((5000,), 255, dtype=torch.uint8)
    assert device_hashes({"a": (data, 7)}) == {"a": library_hash(data, 7)}


def test_memory_that_starts_anywhere_is_read_rightly():
    data = random_bytes(5000)[3:]
    assert device_hashes({"a": (data, 7)}) == {"a": library_hash(data, 7)}


def test_what_is_changed_after_it_was_added_was_hashed_before(monkeypatch):
    monkeypatch.setattr(digest, "HELD", 100)  # chains in several parts
    hashes, names = {}, [f"weight {i}" for i in range(5)]
    device = digest.DeviceHashes(hashes)
    memory = torch.empty(3000, dtype=torch.uint8)
    for i, name in enumerate(names):
        memory.copy_(random_bytes(3000, i))
        device.add(name, memory, i)
    device.finish()
    assert hashes == {name: library_hash(random_bytes(3000, i), i) for i, name in enumerate(names)}


def test_a_trainer_on_a_gpu_and_a_checker_on_a_cpu_have_one_digest(monkeypatch):
    weights = {
        "small": torch.randn(7), "norm": torch.randn(2048).bfloat16(),
        "linear": torch.randn(130, 65).bfloat16(), "embedding": torch.randn(999, 33),
    }  # fmt: skip

    on_cpu = digest_of(weights)
    monkeypatch.setattr(digest, "hashes_itself", lambda flat: len(flat) > digest.BLOCK)
    assert digest_of(weights) == on_cpu
    for place in (0, 4000, weights["linear"].numel() - 1):
        flipped = weights["linear"].clone()
        flipped.view(-1).view(torch.int16)[place] ^= 1
        assert digest_of({**weights, "linear": flipped}) != on_cpu


def test_a_tensor_added_again_on_a_gpu_replaces_the_earlier_one(monkeypatch):
    weight, small = torch.randn(999), torch.randn(3)
    want = WeightDigest()
    want.add("a", weight)
    want.add("b", small)
    monkeypatch.setattr(digest, "hashes_itself", lambda flat: len(flat) > digest.BLOCK)
    got = WeightDigest()
    for name, tensor in [("a", small), ("b", weight), ("a", torch.zeros(999)), ("a", weight)]:
        got.add(name, tensor)
    got.add("b", small)
    assert got.hexdigest() == want.hexdigest()
