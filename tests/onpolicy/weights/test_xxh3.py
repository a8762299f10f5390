"""The kernels in Triton's interpreter, against the library `xxhash`. No GPU has run them."""

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.weights import digest, xxh3
from onpolicy.weights.digest import WeightDigest
from tests.support.weight_digests import digest_of

SEEDS = (0, 1, 0x0123456789ABCDEF, (1 << 64) - 1)
LENGTHS = (1025, 1026, 1088, 1089, 2047, 2048, 2049, 3000, 16 * 1024 + 5, 18 * 1024, 40_000)
"""In bytes: one byte after a block, whole stripes and blocks, and more blocks than are loaded ahead."""


def random_bytes(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (length,), generator=generator, dtype=torch.uint8)


def device_hashes(tensors):
    """As a GPU hashes them: {name: (uint8 [bytes], seed)}"""
    hashes = {}
    device = xxh3.DeviceHashes(hashes)
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
    monkeypatch.setattr(xxh3, "HELD", 100)  # chains in several parts
    hashes, names = {}, [f"weight {i}" for i in range(5)]
    device = xxh3.DeviceHashes(hashes)
    memory = torch.empty(3000, dtype=torch.uint8)
    for i, name in enumerate(names):
        memory.copy_(random_bytes(3000, i))
        device.add(name, memory, i)
    device.finish()
    assert hashes == {name: library_hash(random_bytes(3000, i), i) for i, name in enumerate(names)}


def test_a_trainer_on_a_gpu_and_a_checker_on_a_cpu_have_one_digest(monkeypatch):
    weights = {
        "small": torch.randn(7),
        "norm": torch.randn(2048).bfloat16(),
        "linear": torch.randn(130, 65).bfloat16(),
        "embedding": torch.randn(999, 33),
    }

    on_cpu = digest_of(weights)
    monkeypatch.setattr(digest, "hashes_itself", lambda flat: len(flat) > xxh3.BLOCK)
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
    monkeypatch.setattr(digest, "hashes_itself", lambda flat: len(flat) > xxh3.BLOCK)
    got = WeightDigest()
    for name, tensor in [("a", small), ("b", weight), ("a", torch.zeros(999)), ("a", weight)]:
        got.add(name, tensor)
    got.add("b", small)
    assert got.hexdigest() == want.hexdigest()
