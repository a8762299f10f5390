"""A long sequence takes memory in proportion to its tokens: no tensor grows with their square."""

import pytest
import torch
from torch.distributed._composable import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onpolicy.models.policy import PackedTokens
from onpolicy.ops.cpu import CpuOperators
from tests.onpolicy.models.test_policy import load_policy
from tests.support.decode_loop import decode_log_probs
from tests.support.tiny import make_checkpoint

SHORT, LONG = 384, 768


class Allocations(TorchDispatchMode):
    """The memory of all tensors that are alive at once, and of the largest, in bytes."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self.largest = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(
                    storage
                )
                self.largest = max(self.largest, storage.nbytes())
        self.alive = {key: ref for key, ref in self.alive.items() if not ref.expired()}
        sizes = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.alive.values())
        self.peak = max(
            self.peak, sum(storage.nbytes() for storage in sizes if storage is not None)
        )
        return result


class QuadraticOperators(CpuOperators):
    """The violation: scores of all tokens with all tokens."""

    def attention(self, q, k, v, *how):
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
        return super().attention(q + 0 * scores.sum(), k, v, *how)


def step(path, operators, tokens):
    """Allocations of a forward and backward pass over one sequence, its layers checkpointed."""
    policy = load_policy(path, operators)
    for layer in policy.layers:
        checkpoint(layer)
    sequence = [2 + i % 130 for i in range(tokens)]
    with Allocations() as allocations:
        log_probs, *_ = policy(PackedTokens.after_prompts([sequence], [1], 1.0))
        log_probs.sum().backward()
    return allocations


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    changes = {"max_position_embeddings": 8192}
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", **changes)


def test_twice_the_tokens_take_at_most_twice_the_memory(path):
    short, long = (step(path, CpuOperators(1), tokens) for tokens in (SHORT, LONG))
    assert long.largest <= 2.1 * short.largest
    assert long.peak <= 2.1 * short.peak


def test_scores_of_all_tokens_with_all_are_found(path):
    short, long = (step(path, QuadraticOperators(1), tokens) for tokens in (SHORT, LONG))
    assert long.largest > 3.5 * short.largest


def test_of_4096_tokens_none_differs_from_a_decode_loop_over_a_paged_store(path):
    policy, operators = load_policy(path), CpuOperators(1)
    sequences = [[2 + i * i % 131 for i in range(n)] for n in (4096, 40)]
    with torch.no_grad():
        log_probs, *_ = policy(PackedTokens.after_prompts(sequences, [1, 1], 0.7))
    decoded = decode_log_probs(load_policy(path), operators, sequences, 0.7)
    assert torch.equal(log_probs, torch.cat(decoded))
