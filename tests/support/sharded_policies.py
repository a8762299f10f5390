"""A policy as one tensor-parallel rank of SGLang holds it, and what such ranks compute, recorded.

The ranks are threads (tests/support/ranks.py). Linears are cut by the plan of the Hugging Face model,
experts along their intermediate axis, the head after padding, as SGLang pads it.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from onpolicy.explain.taps.recorder import Recorder, Recording
from onpolicy.models.align import AlignedLinear
from onpolicy.models.expert_layers import AlignedExperts
from onpolicy.models.policy import empty_policy
from onpolicy.models.tensor_parallel import row_parallel_linears
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.log_probs import VocabParallel
from onpolicy.ops.row_parallel import RowParallel
from tests.support.ranks import on_ranks
from tests.support.recorded_policies import record_rollout

RANKS = BLOCKS = 2
PADDED_TO = 64
"""SGLang makes a vocabulary a multiple of it."""


def load_in_blocks(path):
    """A trainer's, whole, whose sums are made as ranks make them."""
    config = AutoConfig.from_pretrained(path)
    policy = empty_policy(config, CpuOperators(1), row_parallel_blocks=BLOCKS)
    weights = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    policy.causal_lm.load_state_dict(weights, strict=False, assign=True)
    return policy


def record_ranks(
    path,
    sequences,
    break_=lambda rank, policy: CpuOperators(1),
    on_pass=lambda rank, spans, store: None,
    recorders=(),
    passes=None,
):
    """What the ranks of a rollout compute of the sequences.

    passes: grows by the calls of each pass of each rank.
    """
    recorders = recorders or [Recorder(rank) for rank in range(RANKS)]
    policies = [load_in_blocks(path) for _ in range(RANKS)]

    def run(rank):
        _cut(policies[rank], rank)
        operators = break_(rank, policies[rank])
        own = policies[rank], operators, sequences, recorders[rank], partial(on_pass, rank)
        return record_rollout(*own, passes)

    recording = Recording()
    for outcome in on_ranks(RANKS, run):
        if isinstance(outcome, Exception):
            raise outcome
        for site, by_rank in outcome.items():
            recording.setdefault(site, {}).update(by_rank)
    return recording


def _cut(policy, rank):
    group = dist.group.WORLD
    model = policy.causal_lm
    shared = row_parallel_linears(model)
    for name, module in model.base_model.named_modules():
        if isinstance(module, AlignedExperts):
            gate_up = module.gate_up_proj.chunk(2, 1)
            module.gate_up_proj = _part(torch.cat([x.chunk(RANKS, 1)[rank] for x in gate_up], 1))
            module.down_proj = _part(module.down_proj.chunk(RANKS, 2)[rank])
            module.row_parallel = RowParallel(BLOCKS, group)
        elif isinstance(module, AlignedLinear) and not name.endswith(".gate"):
            is_row = module in shared
            module.weight = _part(module.weight.chunk(RANKS, int(is_row))[rank])
            module.row_parallel = RowParallel(BLOCKS, group) if is_row else module.row_parallel
    head = model.get_output_embeddings()
    size = len(head.weight)
    padded = F.pad(head.weight, (0, 0, 0, -size % PADDED_TO))
    head.weight = _part(padded.chunk(RANKS)[rank])
    policy.logits_rule = _Gathered(VocabParallel(size, group))


def _part(weight):
    return nn.Parameter(weight.detach().clone())


class _Gathered:
    """SGLang's logits processor gathers what the ranks have projected."""

    def __init__(self, vocabulary):
        self._vocabulary = vocabulary

    def apply(self, operators, logits):
        return self._vocabulary.gather(logits)
