"""The trainer's model in float64: what an engine would compute that makes no errors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from onpolicy.errors import EngineError
from onpolicy.explain.taps.points import Changing
from onpolicy.explain.taps.policy import packed_keys, scopes, tapped
from onpolicy.models.policy import PackedTokens, PolicyModel, empty_policy
from onpolicy.models.stored import stored_tensors
from onpolicy.ops.stock import StockOperators
from onpolicy.run.engines import EnginePair
from onpolicy.train.policy_trainer import PolicyTrainer

_BUCKET = 1 << 30


class ExactOperators(StockOperators):
    """PyTorch's, in float64 where there is none of its own."""

    def grouped_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        parts = x.split(offsets.diff().tolist())  # PyTorch's own has no float64
        return torch.cat([F.linear(*pair) for pair in zip(parts, weight, strict=True)])

    def grouped_partial_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return self.grouped_linear(x, weight, offsets)


class ExactModel:
    """A policy in float64, whose operators are PyTorch's."""

    def __init__(self, policy: PolicyModel):
        self.policy = policy.requires_grad_(False)

    def log_probs(self, batch: PackedTokens, recorder: Changing) -> Tensor:
        """float64 [R, V]: of every token in place of each that is asked for."""
        policy = self.policy
        hooks = scopes(policy.causal_lm.base_model, recorder)
        recorder.open(packed_keys(batch.tokens, batch.layout), batch.rows)
        try:
            with policy.around_operators(partial(tapped, recorder=recorder)):
                logits = policy.head().logits(policy.hidden_states(batch))
        finally:
            recorder.close()
            for hook in hooks:
                hook.remove()
        return torch.log_softmax(logits / batch.temperature[:, None].double(), dim=-1)


def exact_policy(engines: EnginePair) -> PolicyModel:
    """The trainer's model in float64, of the weights that it computes with: 8 bytes for each."""
    weights, *_ = engines.trainer.on_each_rank(_whole_weights)
    trust = engines.config.model.trust_remote_code
    operators = ExactOperators(torch.get_num_threads())
    blocks = engines.contract.row_parallel_blocks  # they name its linears
    policy = empty_policy(engines.hf_config, operators, trust, row_parallel_blocks=blocks)
    weights |= _put_together(policy.causal_lm, weights)
    policy.causal_lm.load_state_dict(weights, strict=False, assign=True)
    policy.causal_lm.tie_weights()
    if missing := [name for name, x in policy.named_parameters() if x.is_meta]:
        raise EngineError(
            f"the trainer has no weights named {', '.join(missing)}, so there is no model in float64. "
            "Explain without --attribution operators."
        )
    return policy.double()


def _whole_weights(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """What it computes with, by Hugging Face's names: the first rank's answer has all. Collective."""
    buckets = trainer.policy.weight_buckets(_BUCKET)
    return {name: tensor.detach().clone() for bucket in buckets for name, tensor in bucket}


def _put_together(causal_lm: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters that are several tensors of a checkpoint, as all experts of a layer are."""
    found = {}
    for name, parameter in causal_lm.named_parameters():
        if name in weights:
            continue
        whole = torch.empty(parameter.shape)
        parts = stored_tensors(causal_lm, name, whole)
        if parts.keys() <= weights.keys():
            for own, part in parts.items():
                part.copy_(weights[own])
            found[name] = whole
    return found
