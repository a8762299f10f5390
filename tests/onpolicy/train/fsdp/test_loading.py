"""Every rank reads its own shards of a checkpoint, and no more than them."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from onpolicy.errors import ConfigError
from onpolicy.models.checkpoint_reader import CheckpointReader
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.hf_config import load_config
from onpolicy.train import distributed
from onpolicy.train.fsdp.loading import load_shards
from tests.support.forked_ranks import run_on_ranks
from tests.support.tiny import ARCHITECTURES, make_checkpoint

RANKS = 3  # divides none of the sizes


def load(path):
    """A sharded model of a checkpoint, and how many elements of it this rank has read."""
    config = load_config(str(path))
    model = empty_causal_lm(config, trust_remote_code=False).float()
    model.tie_weights()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    buffers = dict(model.named_buffers())
    model.to_empty(device="cpu")
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer
    read, counts = CheckpointReader.read, []

    def counted(reader, name, block):
        tensor = read(reader, name, block)
        counts.append(tensor.numel())
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointReader, "read", counted)
        load_shards(model, "", str(path), config, False)
    return model, sum(counts)


def on_rank(rank, path, address):
    init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=RANKS)
    try:
        model, count = load(path)
        original = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), original[name]), name
        held = sum(p.to_local().numel() for p in model.parameters())
        whole = {n for n, _ in model.named_buffers()} & model.state_dict().keys()
        assert count == held + sum(model.state_dict()[n].numel() for n in whole)
        total = sum(p.numel() for p in model.parameters())
        assert held < math.ceil(total / RANKS) * 1.1
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
        assert torch.equal(model.get_parameter(name).full_tensor(), tensor)


def test_a_tensor_that_no_file_holds_is_named(tmp_path):
    path = make_checkpoint(tmp_path / "model")
    renamed(path, lambda name: name.replace("layers.1.mlp.up_proj", "layers.1.mlp.other"))
    distributed.init_process_group()
    with pytest.raises(ConfigError, match=r"tensors that it lacks: model\.layers\.1\.mlp\.up_proj"):
        load(path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_rank_reads_everything_once(architecture, tmp_path):
    path = make_checkpoint(tmp_path / "model", architecture)
    distributed.init_process_group()
    _, count = load(path)
    assert count == sum(tensor.numel() for tensor in load_file(path / "model.safetensors").values())
