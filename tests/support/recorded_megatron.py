"""Megatron's model as the trainer that is recorded, broken in one module, in a rank of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onpolicy.explain.source import count_sites, first_source
from onpolicy.ops.cpu import CpuOperators
from onpolicy.taps.recorder import Recorder
from onpolicy.taps.recording import Recording
from onpolicy.taps.rows import prefix_keys
from tests.onpolicy.models.test_policy import load_policy
from tests.support import faults
from tests.support.megatron_ranks import Job, make_model, pack
from tests.support.recorded_policies import record_rollout


def sources_of_faults(job: Job, cases: list[tuple[str, str, str]]) -> list[Any]:
    """Where recordings part: of (Megatron's module, operator, fault) each; first of a whole one.

    The whole one's is (sources, rows of every site, rows that differ, sites of one side alone).
    """
    sequences = job.batches[0]
    model = make_model(job)
    rollout = record_rollout(load_policy(job.path), CpuOperators(1), sequences)

    def sources(train: Recording) -> list[Any]:
        found = [first_source(rollout, train, prefix_keys(s)[:-1]) for s in sequences]
        return [source for source in found if source is not None]

    whole = record(model, sequences)
    counts = list(count_sites(rollout, whole))
    differ = sum(c.inputs_differ + c.outputs_differ for c in counts)
    answers: list[Any] = [
        (sources(whole), {c.rows for c in counts}, differ, set(whole) ^ set(rollout))
    ]
    for module, operator, fault in cases:
        with broken(model, module, operator, getattr(faults, fault)):
            (source, *_) = sources(record(model, sequences))
        answers.append((source.cause, *source.site[:2]))
    return answers


def record(model: Any, sequences: list[list[int]], recorder: Recorder | None = None) -> Recording:
    """What Megatron's model computes of sequences in one micro-batch."""
    from onpolicy.train.megatron.model import packed_forward
    from onpolicy.train.megatron.taps import recording

    with recording(model, recorder or Recorder()) as passes, torch.no_grad():
        packed_forward(model, pack(sequences))
    return Recording.of(passes)


@contextmanager
def broken(model: Any, module: str, operator: str, make: Callable[..., Any]) -> Iterator[None]:
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
