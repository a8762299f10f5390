"""Every rank reads its own shards of a checkpoint, and no more than them."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import destroy_process_group, init_process_group
from transformers import AutoModelForCausalLM

from onpolicy.errors import ConfigError
from onpolicy.models.weight_files import CheckpointReader
from onpolicy.ops.cpu import CpuOperators
from onpolicy.training import distributed
from onpolicy.training.fsdp.sharding import gather_buckets, load_sharded_policy
from tests.support.forked_ranks import run_on_ranks
from tests.support.tiny import make_checkpoint

RANKS = 3  # divides none of the sizes


def load(path):
    """A sharded model of a checkpoint, and how many elements of it this rank has read."""
    read, counts = CheckpointReader.read, []

    def counted(reader, name, block):
        tensor = read(reader, name, block)
        counts.append(tensor.numel())
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointReader, "read", counted)
        model = load_sharded_policy(
            str(path),
            CpuOperators(1),
            torch.float32,
            device=torch.device("cpu"),
            activation_checkpointing=False,
            trust_remote_code=False,
            row_parallel_blocks=1,
        )
    return model, sum(counts)


def on_rank(rank, path, address):
    init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=RANKS)
    try:
        model, count = load(path)
        original = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for name, parameter in model.causal_lm.named_parameters():
            assert torch.equal(parameter.full_tensor(), original[name]), name
        stored = model.state_dict()
        buffers = sum(b.numel() for name, b in model.named_buffers() if name in stored)
        held = sum(p.to_local().numel() for p in model.parameters())
        assert count == held + buffers
        total = sum(p.numel() for p in model.parameters())
        assert held < math.ceil(total / RANKS) * 1.1
        saved = load_file(path / "model.safetensors")
        for ranks in ([0], [1], [0, 1]):
            sent = gather_buckets(model, torch.float32, 1, "all", ranks)
            pushed = {name: tensor for bucket in sent for name, tensor in bucket}
            size = sum(tensor.numel() for tensor in pushed.values())
            assert size == (total + buffers if rank in ranks else 0)
            assert all(torch.equal(tensor, saved[name]) for name, tensor in pushed.items())
    finally:
        destroy_process_group()


@pytest.mark.parametrize("architecture", ["qwen3-tied", "qwen3-moe", "glm4-moe"])
def test_a_rank_reads_its_rows_alone_and_all_together_have_the_checkpoint(architecture, tmp_path):
    path = make_checkpoint(tmp_path / "model", architecture)
    run_on_ranks(on_rank, (path, tmp_path / "group"), RANKS)


def renamed(path, rename):
    file = path / "model.safetensors"
    save_file({rename(k): v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("model."),
        lambda name: name.replace("model.embed_tokens", "lm_head"),
    ],
    ids=["base-model", "head-for-embedding"],
)
def test_names_that_transformers_understands_are_understood(rename, tmp_path):
    path = make_checkpoint(tmp_path / "model", "qwen3-tied")
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    renamed(path, rename)
    distributed.init_process_group()
    model, _ = load(path)
    for name, tensor in expected.named_parameters():
        assert torch.equal(model.causal_lm.get_parameter(name).full_tensor(), tensor)


def test_a_tensor_that_no_file_holds_is_named(tmp_path):
    path = make_checkpoint(tmp_path / "model")
    renamed(path, lambda name: name.replace("layers.1.mlp.up_proj", "layers.1.mlp.other"))
    distributed.init_process_group()
    with pytest.raises(ConfigError, match=r"tensors that it lacks: model\.layers\.1\.mlp\.up_proj"):
        load(path)
