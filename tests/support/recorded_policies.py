"""A trainer and a rollout engine in this process, both recorded; one can be broken in one place."""

import copy
from contextlib import contextmanager
from functools import partial

import torch

from onpolicy.explain.taps.attachment import passes_of, scopes, tapped
from onpolicy.explain.taps.recorder import Recorder, Recording
from onpolicy.explain.taps.row_keys import prefix_keys
from onpolicy.models.policy import PackedTokens
from tests.support.decode_loop import decode_log_probs

TEMPERATURE = 0.7


@contextmanager
def recording(policy, recorder):
    """Record every forward pass of a trainer's model; yields what grows by the calls of each."""
    tap = partial(tapped, recorder=recorder)
    with policy.around_operators(tap), passes_of(policy, recorder) as passes:
        yield passes


def record_trainer(policy, sequences, recorder=None):
    """All sequences packed into one micro-batch."""
    with recording(policy, recorder or Recorder()) as passes, torch.no_grad():
        policy(PackedTokens.after_prompts(sequences, [1] * len(sequences), TEMPERATURE))
    return Recording.of(passes)


def record_rollout(
    policy, operators, sequences, recorder=None, on_pass=lambda spans, store: None, passes=None
):
    """The same tokens in chunks, then one by one; `operators` attend and make logits.

    passes: grows by the calls of each.
    """
    recorder, passes = recorder or Recorder(), [] if passes is None else passes
    keys = [prefix_keys(sequence) for sequence in sequences]

    def open_pass(spans, store):
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


def replace_in(monkeypatch, policy, module, name, make):
    """Let the operator `name` of one module be `make(the right one)` until the test has ended."""
    target = policy.causal_lm.base_model.get_submodule(module)
    broken = copy.copy(target.operators)
    setattr(broken, name, make(getattr(broken, name)))
    monkeypatch.setattr(target, "operators", broken)
