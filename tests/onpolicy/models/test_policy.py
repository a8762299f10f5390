"""The aligned model against transformers' own, its batch invariance, and long sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._composable import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from onpolicy.models.align import AlignedActivation, AlignedLinear
from onpolicy.models.expert_layers import AlignedExperts
from onpolicy.models.facts import ModelFacts
from onpolicy.models.norms import AlignedRMSNorm
from onpolicy.models.policy import PackedTokens, empty_policy
from onpolicy.models.size import operator_shapes
from onpolicy.ops.cpu import CpuOperators
from tests.support.decode_loop import decode_log_probs
from tests.support.tiny import ARCHITECTURES, EXPERT_ARCHITECTURES, make_checkpoint

ALIGNED = {AlignedLinear, AlignedRMSNorm, AlignedActivation, AlignedExperts}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def path(architecture, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), architecture)


def load_policy(path, operators=None, dtype=torch.float32):
    policy = empty_policy(AutoConfig.from_pretrained(path), operators or CpuOperators(1))
    weights = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict()
    policy.causal_lm.load_state_dict(weights, strict=False, assign=True)
    policy.causal_lm.tie_weights()
    return policy


def random_sequences(lens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 137, (n,), generator=generator).tolist() for n in lens]


def log_probs(policy, sequences, prompt_lens, temperature=1.0):
    with torch.no_grad():
        flat, *_ = policy(PackedTokens.after_prompts(sequences, prompt_lens, temperature))
    lens = [len(s) - p for s, p in zip(sequences, prompt_lens, strict=True)]
    return list(flat.split(lens))


def test_log_probs_are_close_to_transformers(path):
    sequences, prompt_lens = random_sequences([5, 40, 90]), [2, 10, 1]
    ours = log_probs(load_policy(path), sequences, prompt_lens, temperature=0.7)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for sequence, prompt_len, got in zip(sequences, prompt_lens, ours, strict=True):
        with torch.no_grad():
            logits = stock(torch.tensor([sequence])).logits[0, :-1] / 0.7
        want = torch.log_softmax(logits, -1).gather(1, torch.tensor(sequence)[1:, None])[:, 0]
        torch.testing.assert_close(got, want[prompt_len - 1 :], rtol=1e-4, atol=1e-4)


@settings(max_examples=10)
@given(st.lists(st.integers(2, 80), min_size=2, max_size=6), st.data())
def test_a_sequence_does_not_depend_on_its_micro_batch(path, lens, data):
    policy = load_policy(path)
    sequences = random_sequences(lens, seed=sum(lens))
    prompt_lens = [data.draw(st.integers(1, n - 1)) for n in lens]
    together = log_probs(policy, sequences, prompt_lens)
    order = data.draw(st.permutations(range(len(lens))))
    cut = data.draw(st.integers(1, len(lens) - 1))
    for part in (order[:cut], order[cut:]):
        parts = log_probs(policy, [sequences[i] for i in part], [prompt_lens[i] for i in part])
        for i, got in zip(part, parts, strict=True):
            assert torch.equal(got, together[i])


def test_every_module_that_has_an_aligned_counterpart_is_replaced(path, architecture):
    policy = load_policy(path)
    kinds = {type(module) for module in policy.modules()}
    inner = AlignedExperts if architecture in EXPERT_ARCHITECTURES else AlignedActivation
    assert {AlignedLinear, AlignedRMSNorm, inner} <= kinds
    assert torch.nn.Linear not in kinds
    assert not any(kind.__name__.endswith(("RMSNorm", "Experts")) for kind in kinds - ALIGNED)


def test_operator_shapes_are_the_models(path):
    shapes = operator_shapes(ModelFacts(AutoConfig.from_pretrained(path)))
    assert (137, 96, False) in shapes.linear
    (kind,) = shapes.attention
    assert (kind.heads, kind.kv_heads, shapes.vocab_size) == (4, 2, 137)
    assert 96 in shapes.norm
    assert shapes.linear == tuple(sorted(shapes.linear))


def test_tokens_are_asked_for_by_their_mask_and_have_the_bits_of_all(path):
    """Whatever was given between them."""
    policy, sequences = load_policy(path), random_sequences([30, 7])
    every = log_probs(policy, sequences, [1, 1])
    asked = [[i % 5 in (2, 3) for i in range(30)], [i > 4 for i in range(7)]]
    with torch.no_grad():
        found, *_ = policy(
            PackedTokens.pack(sequences, asked, [[1.0] * sum(mask) for mask in asked])
        )
    wanted = [values[torch.tensor(mask[1:])] for values, mask in zip(every, asked, strict=True)]
    assert torch.equal(found, torch.cat(wanted))
    shifted = [mask[1:] + [False] for mask in asked]
    with torch.no_grad():
        other, *_ = policy(
            PackedTokens.pack(sequences, shifted, [[1.0] * sum(mask) for mask in shifted])
        )
    assert not torch.equal(found, other[: len(found)])


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


def step(long_path, operators, tokens):
    """Allocations of a forward and backward pass over one sequence, its layers checkpointed."""
    policy = load_policy(long_path, operators)
    for layer in policy.layers:
        checkpoint(layer)
    sequence = [2 + i % 130 for i in range(tokens)]
    with Allocations() as allocations:
        log_probs, *_ = policy(PackedTokens.after_prompts([sequence], [1], 1.0))
        log_probs.sum().backward()
    return allocations


@pytest.fixture(scope="module")
def long_path(tmp_path_factory):
    changes = {"max_position_embeddings": 8192}
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", **changes)


def test_twice_the_tokens_take_at_most_twice_the_memory(long_path):
    short, long = (step(long_path, CpuOperators(1), tokens) for tokens in (SHORT, LONG))
    assert long.largest <= 2.1 * short.largest
    assert long.peak <= 2.1 * short.peak


def test_of_4096_tokens_none_differs_from_a_decode_loop_over_a_paged_store(long_path):
    policy, operators = load_policy(long_path), CpuOperators(1)
    sequences = [[2 + i * i % 131 for i in range(n)] for n in (4096, 40)]
    with torch.no_grad():
        log_probs, *_ = policy(PackedTokens.after_prompts(sequences, [1, 1], 0.7))
    decoded = decode_log_probs(load_policy(long_path), operators, sequences, 0.7)
    assert torch.equal(log_probs, torch.cat(decoded))
