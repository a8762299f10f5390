"""Weights in and out of real models on two ranks, tensor by tensor; nothing here needs CUDA names."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from onpolicy.training.megatron.rank_layout import MegatronLayout
from tests.support.megatron_ranks import Job, count_parameters, export, with_blocks

DATA = MegatronLayout()
TENSOR = MegatronLayout(tensor_model_parallel_size=2)
EXPERTS = MegatronLayout(expert_model_parallel_size=2)
BUCKET_BYTES = 30_000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        ("qwen3", DATA), ("qwen3", TENSOR), ("qwen3-tied", TENSOR), ("qwen2", TENSOR),
        ("llama", TENSOR), ("olmo2", TENSOR), ("qwen3-moe", DATA), ("qwen3-moe", TENSOR),
        ("qwen3-moe", EXPERTS), ("mixtral", EXPERTS), ("qwen2-moe", TENSOR), ("glm4-moe", EXPERTS),
    ],
)  # fmt: skip
def test_what_was_loaded_comes_out_under_its_names(
    two_ranks, model_of, architecture, layout, dtype
):
    path = model_of(architecture)
    job = with_blocks(Job(path=path, batches=[], dtype=dtype), layout)
    (names, weights), (others, nothing) = two_ranks.run(export, job, BUCKET_BYTES)
    stored = load_file(path / "model.safetensors")
    assert weights.keys() == stored.keys()
    for name, tensor in stored.items():
        is_buffer = name.endswith("e_score_correction_bias")
        want = tensor.to(torch.float32 if is_buffer else getattr(torch, dtype))
        assert torch.equal(weights[name], want), name
    assert len(others) == len(names) > 3 and not nothing
    for bucket in names:
        size = sum(weights[name].nbytes for name in bucket)
        assert len(bucket) == 1 or size <= BUCKET_BYTES


@pytest.mark.parametrize("layout", [DATA, TENSOR, MegatronLayout(pipeline_model_parallel_size=2)])
def test_weights_come_out_in_two_parts_by_what_is_trained(two_ranks, model_of, layout):
    job = with_blocks(Job(path=model_of("qwen3"), batches=[], dtype="float32"), layout)
    frozen = ("linear_qkv.weight", "word_embeddings.weight")
    parts = {
        part: two_ranks.run(export, job, BUCKET_BYTES, part, frozen)[0][1]
        for part in ("all", "trained", "frozen")
    }
    want = {n for n in parts["all"] if n.endswith(("_proj.weight", "embed_tokens.weight"))}
    want = {n for n in want if any(k in n for k in ("q_proj", "k_proj", "v_proj", "embed"))}
    assert parts["frozen"].keys() == want and len(want) > 3
    assert parts["trained"].keys() == parts["all"].keys() - want
    for name, tensor in (parts["frozen"] | parts["trained"]).items():
        assert torch.equal(tensor, parts["all"][name]), name


@pytest.mark.parametrize("architecture", ["qwen3-tied", "qwen3-moe"])
@pytest.mark.parametrize("layout", [DATA, TENSOR, MegatronLayout(pipeline_model_parallel_size=2)])
def test_each_rank_that_sends_has_all_weights_and_no_other_has_any(
    two_ranks, model_of, architecture, layout
):
    path = model_of(architecture)
    job = with_blocks(Job(path=path, batches=[]), layout)
    stored = load_file(path / "model.safetensors")
    for senders in ((0,), (1,), (0, 1)):
        of_ranks = two_ranks.run(export, job, BUCKET_BYTES, "all", (), senders)
        for rank, (_, weights) in enumerate(of_ranks):
            assert weights.keys() == (stored.keys() if rank in senders else set())
            assert all(torch.equal(tensor, stored[name]) for name, tensor in weights.items())


def test_layers_for_further_tokens_are_not_read(two_ranks, model_of, tmp_path):
    """GLM-4.5 is published with one; transformers reads over it, and so does the rollout."""
    path = model_of("glm4-moe")
    shutil.copytree(path, tmp_path / "model")
    stored = load_file(path / "model.safetensors")
    further = {"model.layers.46.eh_proj.weight": torch.ones(2, 2)}
    save_file(stored | further, tmp_path / "model" / "model.safetensors")
    (_, weights), _ = two_ranks.run(export, Job(path=tmp_path / "model", batches=[]), BUCKET_BYTES)
    assert weights.keys() == stored.keys()


def test_the_order_of_the_buckets_does_not_depend_on_the_layout(two_ranks, model_of):
    job = Job(path=model_of("qwen3-moe"), batches=[])
    orders = [
        two_ranks.run(export, with_blocks(job, layout), BUCKET_BYTES)[0][0]
        for layout in (DATA, TENSOR, EXPERTS)
    ]
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("layout", [TENSOR, EXPERTS], ids=["tensor", "experts"])
def test_a_rank_holds_its_share_and_no_more(two_ranks, model_of, layout):
    path = model_of("qwen3-moe")
    job = Job(path=path, batches=[])
    (whole, _), (part, other) = (
        two_ranks.run(count_parameters, with_blocks(job, one)) for one in (DATA, layout)
    )
    assert whole == sum(t.numel() for t in load_file(path / "model.safetensors").values())
    assert part == other < 0.8 * whole
