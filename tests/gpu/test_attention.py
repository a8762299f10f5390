"""Attention: a query has the same bits in decoding, in any chunk of a prefill, and in training."""

import pytest
import torch

from onpolicy.ops.backends.entries import FLASH_HEAD_DIMS
from tests.gpu import attention_checks
from tests.gpu.attention_checks import Heads
from tests.support.gpu.paged_attention import paged_attention_of

GROUPS = (1, 4, 8)


@pytest.fixture
def head_dim(dim, backend):
    if backend == "hopper" and dim not in FLASH_HEAD_DIMS:
        pytest.skip(f"head_dim={dim}: hopper operators refuse it")
    return dim


@pytest.mark.parametrize("group", GROUPS)
def test_decoding_and_chunks_have_the_bits_of_the_training_forward(
    operators, backend, head_dim, group, setting, numbers, tally
):
    heads = Heads(8, 8 // group, head_dim)
    # Every size is a kernel that Triton compiles, for each kind of heads.
    page_sizes = setting.page_sizes if group == 4 else setting.page_sizes[::2]
    with torch.no_grad():
        for page_size in page_sizes:
            attention_checks.check_paged(
                operators, paged_attention_of(backend), heads, page_size, setting.longest,
                setting.batch_sizes, numbers, tally,
            )  # fmt: skip


def test_the_heads_of_each_model(operators, backend, model, setting, numbers, tally):
    heads = Heads(model.heads, model.kv_heads, model.head_dim)
    with torch.no_grad():
        attention_checks.check_paged(
            operators, paged_attention_of(backend), heads, setting.page_sizes[-1], setting.longest,
            setting.batch_sizes, numbers, tally,
        )  # fmt: skip


def test_sequences_of_several_chunks_of_keys(operators, backend, setting, numbers, tally):
    heads = Heads(32, 8, 128) if setting.device == "cuda" else Heads(4, 2, 16)
    with torch.no_grad():
        attention_checks.check_paged(
            operators, paged_attention_of(backend), heads, setting.page_sizes[0],
            setting.several_chunks, setting.batch_sizes[:3], numbers, tally,
        )  # fmt: skip


def test_a_sequence_does_not_depend_on_its_micro_batch(
    operators, head_dim, setting, numbers, tally
):
    with torch.no_grad():
        attention_checks.check_packing(
            operators, Heads(8, 2, head_dim), setting.longest, numbers, tally
        )


@pytest.mark.parametrize("group", GROUPS)
def test_results_and_gradients_are_right_and_gradients_repeat(
    operators, head_dim, group, setting, numbers, tally
):
    heads = Heads(8, 8 // group, head_dim)
    attention_checks.check_accuracy(operators, heads, setting.longest, numbers, tally)
