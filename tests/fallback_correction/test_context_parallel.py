"""Two real processes of a context-parallel group, over gloo, against one."""

import struct

import pytest
import torch
import torch.distributed as dist

from fallback_correction.adapters.miles.context import ContextShard
from tests.support.forked_ranks import run_on_ranks

LENGTHS = [13, 1, 0, 64, 7]
NAN_WITH_PAYLOAD = struct.unpack("f", struct.pack("I", 0x7FC12345))[0]
SPECIAL = torch.tensor([-0.0, 0.0, NAN_WITH_PAYLOAD, -torch.inf, 1e-45, 3e38, 1.0])


def tensors():
    """log pi_train, log pi_rollout and the mask of all tokens."""
    generator = torch.Generator().manual_seed(0)
    n = sum(LENGTHS)
    rollout = -3 * torch.rand(n, generator=generator)
    train = rollout + 0.3 * torch.randn(n, generator=generator)
    return train, rollout, torch.rand(n, generator=generator) < 0.8


def zigzag(rank, ranks):
    """Where the tokens of a rank are: chunks i and 2c - 1 - i of each sequence's 2c."""
    sequences = torch.arange(sum(LENGTHS)).split(LENGTHS)
    chunks = [sequence.tensor_split(2 * ranks) for sequence in sequences]
    return torch.cat([c for two in chunks for c in (two[rank], two[2 * ranks - 1 - rank])])


def refusal(shard):
    try:
        shard.gather(torch.ones(len(shard.index)))
    except ValueError as error:
        return str(error)
    return "no error"


def one_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    shard = ContextShard(index=zigzag(rank, 2), num_tokens=sum(LENGTHS))
    mine = [tensor[shard.index] for tensor in tensors()]
    mine[0].requires_grad_()
    gathered = [shard.gather(values) for values in mine]
    halves = torch.tensor([[6, 0, 4, 2], [1, 5, 3]][rank])
    special = ContextShard(index=halves, num_tokens=7)
    nobody = ContextShard(index=torch.tensor([rank]), num_tokens=3)
    everybody = ContextShard(index=torch.tensor([0, 1]), num_tokens=2)
    twice = ContextShard(index=torch.tensor([[0, 0], [1]][rank]), num_tokens=2)
    torch.save(
        {
            "index": shard.index,
            "gathered": gathered,
            "taken": [shard.take(values) for values in gathered],
            "mine": [values.detach() for values in mine],
            "special": special.gather(SPECIAL[halves]).view(torch.int32),
            "integers": special.gather(torch.arange(7)[halves] - 3),
            "refusals": [refusal(shard) for shard in (nobody, everybody, twice)],
        },
        f"{folder}/{rank}.pt",
    )
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the two processes found."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    run_on_ranks(one_rank, (folder,), 2)
    return [torch.load(f"{folder}/{rank}.pt") for rank in range(2)]


def test_the_shards_are_a_zigzag_of_every_sequence(ranks):
    assert sorted(torch.cat([rank["index"] for rank in ranks]).tolist()) == [*range(sum(LENGTHS))]
    assert {0, 12} <= set(ranks[0]["index"].tolist()) and 6 in ranks[1]["index"]


def test_gathered_tensors_are_the_whole_ones_without_gradient(ranks):
    for rank in ranks:
        for got, whole in zip(rank["gathered"], tensors(), strict=True):
            assert torch.equal(got, whole) and got.dtype == whole.dtype
            assert not got.requires_grad


def test_a_rank_takes_its_own_part_of_what_all_have(ranks):
    for rank in ranks:
        assert all(map(torch.equal, rank["taken"], rank["mine"]))


def test_every_value_keeps_its_bits(ranks):
    for rank in ranks:
        assert torch.equal(rank["special"], SPECIAL.view(torch.int32))
        assert rank["integers"].tolist() == [-3, -2, -1, 0, 1, 2, 3]


def test_shards_that_are_no_partition_are_refused_on_every_rank(ranks):
    for rank in ranks:
        nobody, everybody, twice = rank["refusals"]
        assert nobody.startswith("index: 1 of num_tokens=3 tokens")
        assert everybody.startswith("index: 2 of num_tokens=2 tokens")
        assert twice.startswith("index: 1 of num_tokens=2 tokens")
