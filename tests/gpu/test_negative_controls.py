"""Stock kernels fail the very checks that the aligned ones pass: the checks see what they must see."""

from types import SimpleNamespace

import pytest
import torch

from onpolicy.errors import ContractError
from onpolicy.models.facts import ModelFacts
from onpolicy.models.size import operator_shapes
from onpolicy.ops.checks.self_check import self_check
from onpolicy.ops.hopper import gemm
from tests.gpu import attention_checks, gemm_checks
from tests.gpu.attention_checks import Heads
from tests.gpu.backends import make_contract
from tests.gpu.generation import generate, make_config, random_prompts, score
from tests.gpu.row_checks import Numbers
from tests.gpu.tensor_parallel import sum_of_ranks
from tests.support.gpu.operators import make_part, missing_part
from tests.support.gpu.paged_attention import PagedBatch, flash_attention_3, over_rows
from tests.support.gpu.paged_model import PagedModel, random_policy

HEADS = Heads(32, 8, 128)


def test_cublas_rows_depend_on_the_number_of_rows(stock, model, setting, tally):
    numbers = Numbers(setting.control_dtype, setting.device)
    with torch.no_grad():
        for name, (n, k) in model.linears().items():
            gemm_checks.check_row_counts(
                stock.linear, n, k, setting.row_counts, numbers, tally, f"{name} {n}x{k}"
            )


def test_an_input_scale_that_the_batch_shares_is_seen(
    of_bytes, model, setting, numbers, tally, monkeypatch
):
    """Check products of bytes."""
    right = gemm.input_in_bytes

    def shared(x):
        made = right(x)
        return made._replace(scales=made.scales.fill_(float(made.scales.max())))

    monkeypatch.setattr(gemm, "input_in_bytes", shared)
    with torch.no_grad():
        for name, (n, k) in gemm_checks.linears_of_bytes(model).items():
            counts = setting.three_row_counts
            gemm_checks.check_row_counts(of_bytes.linear, n, k, counts, numbers, tally, name)


def test_rounded_parts_of_a_sum_depend_on_the_number_of_ranks(
    stock, model, setting, numbers, tally
):
    n, k = model.linears()["o"]
    x, bias = numbers(setting.few_row_counts[-1], k, seed=1), numbers(n, seed=3)
    weight = gemm_checks.make_weight(numbers, n, k)
    with torch.no_grad():
        whole = stock.linear(x, weight, bias)
        for ranks in (2, 4, 8):
            tally.equal(sum_of_ranks(stock, x, weight, bias, ranks), whole, f"{ranks} ranks")


def test_flash_attention_3_with_free_splits_depends_on_the_batch(setting, numbers, tally):
    if setting.device != "cuda":
        pytest.skip("FlashAttention-3 needs a GPU")
    if problem := missing_part("flash_attention_3"):
        pytest.skip(f"FlashAttention-3: {problem}")

    def free(q, k, v, batch, scale):
        return flash_attention_3(q, k, v, batch, scale, num_splits=0)

    def packed(q, k, v, layout, scores):
        batch = PagedBatch.of(layout.key_rows, 1, list(layout.query_lens), list(layout.key_lens))
        return free(q, k, v, batch, scores.scale)[0]

    with torch.no_grad():
        attention_checks.check_paged(
            SimpleNamespace(attention=packed), free, HEADS, 64, setting.longest,
            setting.batch_sizes, numbers, tally,
        )  # fmt: skip


def test_flash_attention_3_without_chunks_has_other_bits_than_with_them(setting, numbers, tally):
    if setting.device != "cuda":
        pytest.skip("FlashAttention-3 needs a GPU")
    if problem := missing_part("flash_attention_3"):
        pytest.skip(f"FlashAttention-3: {problem}")

    def whole(q, k, v, batch, scale):
        return flash_attention_3(q, k, v, batch, scale, num_splits=1)

    with torch.no_grad():
        attention_checks.check_paged(
            make_part("flash_attention_3"), whole, HEADS, 1, setting.several_chunks,
            setting.batch_sizes[:3], numbers, tally,
        )  # fmt: skip


def test_torchs_attention_depends_on_the_number_of_queries(stock, setting, numbers, tally):
    with torch.no_grad():
        attention_checks.check_paged(
            stock, over_rows(stock), HEADS, setting.page_sizes[-1], setting.longest,
            setting.batch_sizes, numbers, tally,
        )  # fmt: skip


def test_a_stock_model_samples_with_other_log_probabilities_than_it_trains_with(
    stock, setting, tally
):
    config = make_config("qwen3", setting.small_model)
    policy = random_policy(config, stock, setting.control_dtype, setting.device)
    longest = setting.longest_prompt + setting.generated
    model = PagedModel(policy, over_rows(stock), setting.sequences, longest, 16)
    prompts = random_prompts(setting, seed=0)
    rollout = generate(model, prompts, setting.generated, 1.0, seed=0)
    with torch.no_grad():
        scored = score(policy, rollout, 1.0, setting.device, seed=7)
    for i, (got, want) in enumerate(zip(scored, rollout.log_probs, strict=True)):
        tally.equal(got, want, f"sequence {i}")


def test_the_check_at_start_up_refuses_stock_operators(stock, model, setting):
    config = make_config("qwen3-moe" if model.experts else "qwen3", model)
    shapes = operator_shapes(ModelFacts(config), row_parallel_blocks=8)
    with pytest.raises(ContractError, match="row-invariant"):
        self_check(stock, make_contract("triton", setting, shapes))
