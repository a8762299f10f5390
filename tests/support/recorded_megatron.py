"""Megatron's model as the trainer that is recorded, broken in one module, in a rank of its own."""

import copy
from contextlib import contextmanager
from functools import partial

import torch

from onpolicy.explain.microscope import Recorded, evidence_in, recordings
from onpolicy.explain.proof import prove
from onpolicy.explain.source import count_sites, first_source, sites_of
from onpolicy.explain.taps.attachment import tapped
from onpolicy.explain.taps.recorder import Recorder
from onpolicy.explain.taps.row_keys import prefix_keys
from onpolicy.models.lora.adapters import add_adapters, drawn_values, is_adapters
from onpolicy.ops.cpu import CpuOperators
from onpolicy.training import distributed
from tests.onpolicy.models.test_policy import load_policy
from tests.support import faults
from tests.support.megatron_ranks import data_rank, make_model, pack
from tests.support.recorded_policies import record_rollout
from tests.support.sharded_policies import load_in_blocks


def sources_of_faults(job, cases):
    """Where recordings part: of (Megatron's module, operator, fault) each; first of a whole one.

    The last rank is the one that is broken. The whole one's is (sources, rows of every site, rows that
    differ, sites of one side alone); a fault's (cause, module, operator, ranks of the trainer, verdict).
    """
    sequences = [sequence for batch in job.batches for sequence in batch]
    model = make_model(job)
    policy = load_policy(job.path) if job.blocks == 1 else load_in_blocks(job.path)
    if job.adapter is not None:
        draw_adapters(model, policy, job.adapter)
    rollout = record_rollout(policy, CpuOperators(1), sequences)

    def sources(train):
        found = [first_source(rollout, train, prefix_keys(s)[:-1]) for s in sequences]
        return [source for source in found if source is not None]

    whole = recordings(record_all(model, job))
    counts = list(count_sites(rollout, whole))
    differ = sum(c.inputs_differ + c.outputs_differ for c in counts)
    only_in_one = set(sites_of(whole)) ^ set(rollout)
    answers = [(sources(whole), {c.rows for c in counts}, differ, only_in_one)]
    for module, operator, fault in cases:
        is_here = distributed.rank() == distributed.world_size() - 1
        make = getattr(faults, fault) if is_here else unchanged
        with broken(model, module, operator, make):
            (source, *_) = sources(recordings(record_all(model, job)))
            verdict = prove_alone(source, model, job, policy, sequences)
        answers.append((source.cause, *source.site[:2], source.train_ranks, verdict))
    return answers


@torch.no_grad()
def draw_adapters(model, policy, shape):
    """Give Megatron's model and Hugging Face's the same numbers, B too."""
    from onpolicy.training.megatron.megatron_weights import fill_adapters

    fill_adapters(model, partial(drawn_values, seed=0))
    add_adapters(policy.causal_lm, policy.operators, shape)
    for name, factor in policy.causal_lm.named_parameters():
        if is_adapters(name):
            factor.copy_(drawn_values(name, factor.shape, seed=0))


def unchanged(right):
    return right


def prove_alone(source, model, job, policy, sequences):
    """The verdict on the operator that was found, run alone on what either side was given."""
    theirs = Recorder()
    theirs.suspect = source.site, source.key, 0
    record_rollout(policy, CpuOperators(1), sequences, theirs)
    recorder = Recorder(suspect=theirs.suspect)
    ours = evidence_in(record_all(model, job, recorder, source.train_ranks[0]))
    assert theirs.evidence is not None and ours is not None
    return prove({0: theirs.evidence}, ours, CpuOperators(1)).verdict


def record_all(model, job, recorder=None, evidence_of=0):
    """What all ranks compute, each of the batch of its share, as a trainer is asked for it."""
    from onpolicy.explain.megatron import tensor_rank

    recorder = recorder or Recorder()
    calls = record_passes(model, job.batches[data_rank()], recorder)
    rank = tensor_rank()
    evidence = recorder.evidence if rank == evidence_of else None
    return distributed.gather(Recorded(tensor_rank=rank, passes=calls, evidence=evidence), None)


def record_passes(model, sequences, recorder):
    from onpolicy.explain.megatron import passes_of
    from onpolicy.training.megatron.config import replaced
    from onpolicy.training.megatron.gpt_model import packed_forward

    tap = replaced(model.config, "operators", tapped(model.config.operators, recorder))
    with tap, passes_of(model, recorder) as passes, torch.no_grad():
        packed_forward(model, pack(sequences))
    return passes


@contextmanager
def broken(model, module, operator, make):
    """All modules share the operators, so the one that is broken asks which module is running."""
    config, target = model.config, model.get_submodule(module)
    right = getattr(config.operators, operator)
    wrong, running = make(right), []
    own, config.operators = config.operators, copy.copy(config.operators)
    setattr(config.operators, operator, lambda *args: (wrong if running else right)(*args))
    hooks = [
        target.register_forward_pre_hook(lambda *_: running.append(1)),
        target.register_forward_hook(lambda *_: running.clear()),
    ]
    try:
        yield
    finally:
        config.operators = own
        for hook in hooks:
            hook.remove()
