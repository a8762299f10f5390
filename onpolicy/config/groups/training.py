"""The training engines and their optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from fallback_correction.config import LengthDecayConfig
from fallback_correction.ranges import at_least
from onpolicy.config.flags import Prefix
from onpolicy.config.kinds import Count, CountOrZero, Momentum, NonNegative, Positive

TrainBackend = Literal["fsdp", "megatron"]


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    train_backend: TrainBackend = "fsdp"
    """Training engine: PyTorch's FSDP2, or Megatron-core with the --megatron-* flags."""

    global_batch_size: Annotated[int | None, at_least(1)] = None
    """Samples per optimizer step; all samples of a rollout if not given."""

    max_tokens_per_gpu: Count = 8192
    """Tokens that one rank packs into a micro-batch; a longer sequence gets one of its own."""

    rank_invariant: bool = False
    """Add gradients in the order of the micro-batches, so that the number of data-parallel ranks changes
    no bit; --true-on-policy-mode always does."""

    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""

    moe_activation_checkpointing: bool = True
    """Recompute mixtures of experts, whatever the flag above says: they keep some 0.5 MB a token and
    layer at the sizes of Qwen3-30B-A3B."""

    lr: NonNegative = 1e-6
    """Peak learning rate of AdamW."""

    lr_warmup_steps: CountOrZero = 0
    """Optimizer steps of linear warm-up."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, down to 0 at the end of the run."""

    lr_schedule: Literal["", "length-decay"] = ""
    """length-decay: also halve the rate in periods that the surge of response length sets."""

    length_decay: Annotated[LengthDecayConfig, Prefix("length_decay_")] = field(
        default_factory=LengthDecayConfig
    )

    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of AdamW."""

    adam_beta1: Momentum = 0.9
    """Decay of AdamW's mean of gradients."""

    adam_beta2: Momentum = 0.95
    """Decay of AdamW's mean of their squares."""

    adam_eps: Positive = 1e-8
    """What AdamW adds to the root of that mean."""

    clip_grad: NonNegative = 1.0
    """Largest norm of the gradient; 0 does not clip."""


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    megatron_tp: Count = 1
    """Tensor-parallel ranks."""

    megatron_sequence_parallel: bool = False
    """Tensor-parallel ranks also share the tokens between their layers."""

    megatron_pp: Count = 1
    """Pipeline stages."""

    megatron_cp: Count = 1
    """Context-parallel ranks: each computes two stretches of every sequence."""

    megatron_ep: Count = 1
    """Expert-parallel ranks; taken from the data-parallel ones."""

    megatron_moe_dispatcher: Literal["allgather", "alltoall"] = "alltoall"
    """How tokens come to the ranks of their experts."""

    megatron_distributed_optimizer: bool = True
    """Data-parallel ranks share the optimizer's state."""
