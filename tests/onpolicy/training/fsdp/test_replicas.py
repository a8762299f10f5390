"""Replicas of a model on groups of ranks (HSDP): the bits of one rank, however ranks are split.

Four gloo processes; no GPU has run this. Several tests rebuild how it went wrong elsewhere.
"""

from functools import reduce
from operator import add

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from onpolicy.errors import TrainingError
from onpolicy.training import distributed
from onpolicy.training.fsdp import fsdp_model, fsdp_optimizer
from onpolicy.training.fsdp.fsdp_model import FsdpModel
from onpolicy.training.fsdp.fsdp_optimizer import OrderedReduceScatter, Turn, sum_gradients
from onpolicy.training.fsdp.replicas import Replicas
from tests.onpolicy.training.test_critic import job_of, learn
from tests.onpolicy.training.test_rank_invariance import (
    ADAPTED,
    CLIPPED,
    NO_MODE,
    OF_EXPERTS,
    ROUNDED,
    run,
    same,
)  # fmt: skip
from tests.support.megatron_training import Job, equal, make, make_samples, train
from tests.support.tiny import make_checkpoint

pytestmark = [pytest.mark.runs, pytest.mark.long]

RANKS = 4
SHARDS = (4, 2, 1)
"""Ranks of a replica."""

SMALL = {"trainer": {"max_tokens_per_gpu": 12}}
"""Micro-batches: two or more for each of four ranks."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mixture"), "qwen3-moe")


def on(shards, path, changes=None, **settings):
    changes = {**(changes or {}), "cluster": {"fsdp_shard_ranks": shards}}
    return Job(path=path, backend="fsdp", changes=changes, **settings)


# Gradients alone.

GRADIENTS = [
    torch.tensor([x, -0.0, 1e-8, 3 * x, x] * RANKS) for x in (1.0, 1e8, -1e8, 0.1, 0.3, 7.7)
]
"""Of six micro-batches: any other order has other sums, and every fifth element is always -0.0."""


def bits(x):
    return x.view(torch.int32).tolist()


def reduced(shards, make, nothing=-0.0, size=5 * RANKS):
    """The bits of the gradients that a rank holds after two rounds, as FSDP2 calls a reduce-scatter."""
    distributed.init_process_group()
    turn = Turn(Replicas(shards, "cpu"))
    group = turn.replicas.mesh.get_group()
    reduce_scatter, gradients, rank = make(turn), None, distributed.rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_optimizer, "NOTHING", nothing)
        for first in (0, RANKS):
            turn.is_filler = first + rank >= len(GRADIENTS)
            ours = torch.zeros(size) if turn.is_filler else GRADIENTS[first + rank][:size]
            output = torch.empty(len(ours) // shards)
            if shards == 1 and make is OrderedReduceScatter:
                output.copy_(ours)
                reduce_scatter.reduce_unsharded(output)
            else:
                reduce_scatter(output, ours.clone(), group, dist.ReduceOp.SUM)
            if make is not OrderedReduceScatter:
                turn.replicas.add(output)
            gradients = output if gradients is None else gradients.add_(output)
        turn.finish_sums()
    return bits(gradients)


def in_one_order(shards, size=5 * RANKS):
    """What every rank has to hold of the sum of a single one."""
    parts = reduce(add, GRADIENTS)[:size].chunk(shards)
    return [bits(parts[rank % shards]) for rank in range(RANKS)]


@pytest.mark.parametrize("shards", SHARDS)
def test_a_shard_is_the_sum_of_one_rank_down_to_the_sign_of_zeros(four_ranks, shards):
    assert four_ranks.run(reduced, shards, OrderedReduceScatter) == in_one_order(shards)


def default_reduce_scatter(turn):
    return DefaultReduceScatter()


@pytest.mark.parametrize("shards", [4, 2])
def test_a_sum_in_another_order_is_another(four_ranks, shards):
    """So the test above would notice."""
    assert four_ranks.run(reduced, shards, default_reduce_scatter) != in_one_order(shards)


@pytest.mark.parametrize("shards", [2, 1])
def test_the_zeros_of_what_is_no_contribution_would_change_a_sign(four_ranks, shards):
    assert four_ranks.run(reduced, shards, OrderedReduceScatter, 0.0) != in_one_order(shards)


@pytest.mark.parametrize("shards", [2, 1])
def test_replicas_may_have_unequal_parts_of_a_shard(four_ranks, shards):
    """Of 9 and of 18 elements."""
    found = four_ranks.run(reduced, shards, OrderedReduceScatter, -0.0, 18)
    assert found == in_one_order(shards, 18)


def exact_gradients(shards, in_order, forgets=False):
    """The gradient of a linear layer after two micro-batches of whole numbers, which any order adds
    exactly: the rank's rows."""
    replicas = Replicas(shards, "cpu")
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.ones_(model[0].weight)
    fully_shard(model, mesh=replicas.mesh)
    turn = sum_gradients(model, in_order=in_order, replicas=replicas)
    for module in model.modules():
        if forgets and isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda gradients: None)
    for number in range(2):
        rows = torch.full((1, 4), 10.0**number * (1 + distributed.rank()))
        model(rows).sum().backward()
    turn.finish_sums()
    return model[0].weight.grad.to_local().unique().tolist()


@pytest.mark.parametrize("shards", [2, 1])
@pytest.mark.parametrize("in_order", [True, False])
def test_every_replica_learns_from_the_micro_batches_of_all(four_ranks, shards, in_order):
    """verl-project/verl#7493: replicas of one rank each did not exchange gradients; pytorch#125484: of
    several micro-batches only the last was exchanged."""
    expected = (1 + 2 + 3 + 4) * 11.0
    assert four_ranks.run(exact_gradients, shards, in_order) == [[expected]] * RANKS
    if not (in_order and shards > 1):  # which needs no hook
        assert four_ranks.run(exact_gradients, shards, in_order, True) != [[expected]] * RANKS


def wait_for(shards):
    """The time limits of the groups, in hours."""
    replicas = Replicas(shards, "cpu")
    groups = replicas.mesh.get_group(), replicas._same, replicas._by_shard
    found = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    return {limit.total_seconds() / 3600 for limit in found}


def test_a_rank_waits_for_others_that_push_as_long_as_in_the_group_of_all(four_ranks):
    assert four_ranks.run(wait_for, 2) == [{2.0}] * RANKS


def differing(shards, wrong):
    """The error of ranks whose gradients are equal, but for one bit on rank `wrong`."""
    replicas = Replicas(shards, "cpu")
    gradients = [
        torch.randn(3, 5, generator=torch.Generator().manual_seed(distributed.rank() % shards))
    ]
    if distributed.rank() == wrong:
        gradients[0].view(torch.int32)[1, 2] ^= 1
    try:
        replicas.require_equal([*gradients, torch.empty(0)])
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shards", [2, 1])
def test_a_wrong_bit_in_the_gradient_of_one_replica_is_named_on_every_rank(four_ranks, shards):
    messages = four_ranks.run(differing, shards, 3)
    assert len({*messages}) == 1 and messages[0].startswith("ranks=[3]: their gradients differ")
    assert "no optimizer step was taken" in messages[0] and "resume" in messages[0]
    assert four_ranks.run(differing, shards, None) == [""] * RANKS


# Whole trainers.


@pytest.mark.parametrize(
    ("model", "updates", "settings"),
    [
        ("checkpoint", 1, {"dtype": "float32", "changes": SMALL}),
        ("mixture", 3, CLIPPED),
        ("checkpoint", 3, ROUNDED),
        ("checkpoint", 3, ADAPTED),
        ("mixture", 3, OF_EXPERTS),
    ],
    ids=["many micro-batches", "experts, clipped", "rounded weights", "adapters", "of experts"],
)
def test_every_split_of_ranks_has_the_bits_of_one(
    four_ranks, one_rank, request, model, updates, settings
):
    """NVIDIA-NeMo/Automodel#3135: the experts alone were not exchanged."""
    path = request.getfixturevalue(model)
    alone = run(one_rank, Job(path=path, backend="fsdp", **settings), updates=updates)
    assert all(step["train/grad_norm"] > 0.1 for step in alone[1])
    for shards in SHARDS:
        assert same(run(four_ranks, on(shards, path, **settings), updates=updates), alone), shards


def test_the_engines_own_sums_have_other_bits(four_ranks, one_rank, checkpoint):
    """So the test above would notice."""
    job = Job(path=checkpoint, backend="fsdp", changes=NO_MODE)
    alone = run(one_rank, job)
    assert not any(same(run(four_ranks, on(s, checkpoint, NO_MODE)), alone) for s in (2, 1))


def test_a_critic_has_the_bits_of_one_rank(four_ranks, one_rank, checkpoint):
    job = job_of(checkpoint, "fsdp")
    (metrics, alone, values), *_ = one_rank.run(learn, job)
    for found, policy, others in four_ranks.run(learn, on(2, checkpoint, job.changes))[:1]:
        assert found == metrics and equal(policy, alone) and torch.equal(others, values)


def steps_with_a_wrong_replica(job, bit):
    """The error of a step in which rank 3 changes a bit of its gradient, and whether weights moved."""
    trainer, clip = make(job), FsdpModel.clip_gradients

    def clip_wrong(self):
        grads = [p.grad.to_local() for p in self.module.parameters() if p.grad is not None]
        if distributed.rank() == 3:
            next(x for x in grads if x.numel()).view(torch.int32).view(-1)[0] ^= bit
        return clip(self)

    before = [p.detach().to_local().clone() for p in trainer.policy.module.parameters()]
    samples, error = make_samples(trainer), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FsdpModel, "clip_gradients", clip_wrong)
        try:
            trainer.train(samples, 0, [1e-3])
        except TrainingError as found:
            error = str(found)
    after = [p.detach().to_local() for p in trainer.policy.module.parameters()]
    return error, all(map(torch.equal, before, after))


def test_no_step_is_taken_where_a_replica_has_another_gradient(four_ranks, checkpoint):
    for error, is_unchanged in four_ranks.run(steps_with_a_wrong_replica, on(2, checkpoint), 1):
        assert error.startswith("ranks=[3]:") and is_unchanged
    for error, is_unchanged in four_ranks.run(steps_with_a_wrong_replica, on(2, checkpoint), 0):
        assert not error and not is_unchanged


def norms_over_all_ranks(job):
    """The gradient norm of a step, and as the sum over all ranks has it."""
    trainer, norms = make(job), []
    norm_of = fsdp_model.global_norm

    def both(shards, operators, group):
        norms.extend(norm_of(shards, operators, each) for each in (group, None))
        return norms[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_model, "global_norm", both)
        trainer.train(make_samples(trainer), 0, [1e-3])
    return norms


@pytest.mark.parametrize("shards", [2, 1])
def test_the_norm_of_a_gradient_counts_one_replica(four_ranks, one_rank, checkpoint, shards):
    """ByteDance-Seed/VeOmni#184: it was the root of the number of replicas too large."""
    norm, _ = one_rank.run(norms_over_all_ranks, Job(path=checkpoint, backend="fsdp"))[0]
    for found, of_all in four_ranks.run(norms_over_all_ranks, on(shards, checkpoint)):
        assert found == norm and of_all > 1.4 * norm


def held(job):
    """The rank's bytes of weights, gradients' sums and moments, and the digest of all weights on it."""
    trainer = make(job)
    trainer.train(make_samples(trainer), 0, [1e-3])
    policy = trainer.policy
    own = [*policy.module.parameters(), *policy.optimizer_tensors()]
    size = sum(x.to_local().nbytes if hasattr(x, "to_local") else x.nbytes for x in own)
    everywhere = policy.weight_buckets(1 << 30, ranks=range(RANKS))
    return size, {name: tensor for bucket in everywhere for name, tensor in bucket}


def test_a_rank_holds_its_replicas_part_and_gathers_all_of_it(four_ranks, one_rank, checkpoint):
    ((whole, alone),) = one_rank.run(held, Job(path=checkpoint, backend="fsdp"))
    for shards in SHARDS:
        sizes, weights = zip(*four_ranks.run(held, on(shards, checkpoint)), strict=True)
        assert 1 <= sum(sizes) * shards / whole / RANKS < 1.05
        assert all(equal(each, alone) for each in weights)


def test_memory_that_leaves_the_device_comes_back(four_ranks, checkpoint):
    stays, leaves = (
        four_ranks.run(train, on(2, checkpoint), 3, None, None, 1, x)[0] for x in (False, True)
    )
    assert stays[0] == leaves[0] and equal(stays[2], leaves[2])


@pytest.mark.parametrize("settings", [{}, ADAPTED], ids=["whole", "adapters"])
def test_a_run_goes_on_under_any_other_split(four_ranks, one_rank, checkpoint, tmp_path, settings):
    """pytorch#145978: weights that were loaded differed from those that were saved."""
    saved = {shards: tmp_path / str(shards) for shards in (0, 2)}
    for directory in saved.values():
        directory.mkdir()
    log_probs, metrics, weights = run(four_ranks, on(2, checkpoint, **settings), save=saved[2])
    run(four_ranks, on(0, checkpoint, **settings), save=saved[0])
    expected = log_probs[1:], metrics[1:], weights
    plain = Job(path=checkpoint, backend="fsdp", **settings)
    assert same(run(one_rank, plain, load=saved[2]), expected)
    for shards, directory in ((4, saved[2]), (2, saved[0]), (1, saved[2])):
        assert same(
            run(four_ranks, on(shards, checkpoint, **settings), load=directory), expected
        ), shards
    sizes = [sum(f.stat().st_size for f in d.rglob("*.distcp")) for d in saved.values()]
    assert sizes[1] < 1.5 * sizes[0]  # a replica writes nothing again
