"""A trainer and a rollout engine in this process, both recorded; one can be broken in one place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from onpolicy.explain.taps.policy import passes_of, scopes, tapped
from onpolicy.explain.taps.recorder import Call, Recorder
from onpolicy.explain.taps.recording import Recording
from onpolicy.explain.taps.rows import prefix_keys
from onpolicy.models.policy import PackedTokens, PolicyModel
from onpolicy.ops import Operators
from tests.support.decode_loop import OnPass, PagedStore, decode_log_probs

TEMPERATURE = 0.7


@contextmanager
def recording(policy: PolicyModel, recorder: Recorder) -> Iterator[list[list[Call]]]:
    """Record every forward pass of a trainer's model; yields what grows by the calls of each."""
    tap = partial(tapped, recorder=recorder)
    with policy.around_operators(tap), passes_of(policy, recorder) as passes:
        yield passes


def record_trainer(
    policy: PolicyModel, sequences: list[list[int]], recorder: Recorder | None = None
) -> Recording:
    """All sequences packed into one micro-batch."""
    with recording(policy, recorder or Recorder()) as passes, torch.no_grad():
        policy(PackedTokens.after_prompts(sequences, [1] * len(sequences), TEMPERATURE))
    return Recording.of(passes)


def record_rollout(
    policy: PolicyModel,
    operators: Operators,
    sequences: list[list[int]],
    recorder: Recorder | None = None,
    on_pass: OnPass = lambda spans, store: None,
    passes: list[list[Call]] | None = None,
) -> Recording:
    """The same tokens in chunks, then one by one; `operators` attend and make logits.

    passes: grows by the calls of each.
    """
    recorder, passes = recorder or Recorder(), [] if passes is None else passes
    keys = [prefix_keys(sequence) for sequence in sequences]

    def open_pass(spans: list[tuple[int, int, int]], store: PagedStore) -> None:
        passes.append(recorder.close())
        on_pass(spans, store)
        rows = torch.tensor([key for i, start, end in spans for key in keys[i][start:end]])
        recorder.open(rows, torch.arange(len(rows)))

    tap = partial(tapped, recorder=recorder)
    hooks = scopes(policy.causal_lm.base_model, recorder)
    with policy.around_operators(tap):
        # The decoder is told its attention, which reads pages, by the loop and not by the policy.
        decode_log_probs(policy, tap(operators), sequences, TEMPERATURE, open_pass)
    for hook in hooks:
        hook.remove()
    passes.append(recorder.close())
    return Recording.of(passes)


def replace_in(
    monkeypatch: Any, policy: PolicyModel, module: str, name: str, make: Callable[..., Any]
) -> None:
    """Let the operator `name` of one module be `make(the right one)` until the test has ended."""
    target: Any = policy.causal_lm.base_model.get_submodule(module)
    broken = copy.copy(target.operators)
    setattr(broken, name, make(getattr(broken, name)))
    monkeypatch.setattr(target, "operators", broken)
