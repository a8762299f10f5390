"""Two real processes of a context-parallel group, over gloo, against one."""

import struct

import pytest
import torch
import torch.distributed as dist

from fallback_correction.config import CorrectionConfig, RejectionRule, Veto
from fallback_correction.context_parallel import ContextShard
from fallback_correction.correction import correct
from fallback_correction.tokens import TokenBatch
from tests.support.forked_ranks import run_on_ranks

LENGTHS = [13, 1, 0, 64, 7]
LEVELS = ["none", "token", "sequence", "geometric"]

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


def corrections(train, rollout, mask):
    """(weights, mask, metrics) of every level."""
    batch = TokenBatch.packed(train, rollout, LENGTHS, mask)
    found = {}
    for level in LEVELS:
        config = CorrectionConfig(
            level=level, self_normalize=True,
            rules=(RejectionRule(statistic="k3", aggregation="mean", upper=0.05),),
            veto=Veto(upper=2.0),
        )  # fmt: skip
        correction = correct(batch, config)
        found[level] = (correction.weights, correction.mask, correction.metrics)
    return found


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
    found = corrections(*gathered)
    halves = torch.tensor([[6, 0, 4, 2], [1, 5, 3]][rank])
    special = ContextShard(index=halves, num_tokens=7)
    nobody = ContextShard(index=torch.tensor([rank]), num_tokens=3)
    everybody = ContextShard(index=torch.tensor([0, 1]), num_tokens=2)
    twice = ContextShard(index=torch.tensor([[0, 0], [1]][rank]), num_tokens=2)
    torch.save(
        {
            "index": shard.index,
            "gathered": gathered,
            "weights": {k: w if w is None else shard.take(w) for k, (w, _, _) in found.items()},
            "masks": {k: shard.take(m) for k, (_, m, _) in found.items()},
            "metrics": {k: metrics for k, (_, _, metrics) in found.items()},
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


@pytest.mark.parametrize("level", LEVELS)
def test_two_processes_find_the_bits_of_one(ranks, level):
    weights, mask, metrics = corrections(*tensors())[level]
    assert 0 < mask.sum() < tensors()[2].sum()
    for rank in ranks:
        assert torch.equal(rank["masks"][level], mask[rank["index"]])
        assert rank["metrics"][level] == metrics
        if weights is None:
            assert rank["weights"][level] is None
        else:
            assert torch.equal(rank["weights"][level], weights[rank["index"]])


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
