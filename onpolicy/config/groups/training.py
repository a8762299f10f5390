"""The flags of the training engines and their optimizer."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from fallback_correction.config import LengthDecayConfig
from fallback_correction.ranges import ReadBy, at_least
from onpolicy.config.flags import Prefix
from onpolicy.config.kinds import Count, CountOrZero, Momentum, NonNegative, Positive
from onpolicy.config.rules import NO_RESULT, Against, Facts, Together

TrainBackend = Literal["fsdp", "megatron"]
BY_MEGATRON = ReadBy("--train-backend megatron", lambda run: "megatron" in run.train_backend)


def _indivisible(run: Facts) -> str | None:
    """Return the possible sizes of optimizer steps, if the requested one is not among them."""
    samples = run.config.samples_per_rollout
    divisors = (str(d) for d in range(1, samples + 1) if samples % d == 0)
    return ", ".join(divisors) if samples % run.global_batch_size else None


def _without_order(run: Facts) -> str | None:
    """Return the first degree under which a rank does not add gradients one micro-batch at a time."""
    degrees = {"--megatron-pp": run.megatron_pp, "--megatron-ep": run.megatron_ep}
    return next((f"{flag}={n}" for flag, n in degrees.items() if n > 1), None)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    train_backend: TrainBackend = "fsdp"
    """Training engine: PyTorch's FSDP2, or Megatron-core with the --megatron-* flags."""

    global_batch_size: Annotated[
        int | None, at_least(1), Against(_indivisible,
            "rollout_batch_size {run.rollout_batch_size} x n_samples_per_prompt "
            "{run.n_samples_per_prompt} = {run.config.samples_per_rollout} samples must be "
            "global_batch_size x a whole number of optimizer steps",
            "Divisors of {run.config.samples_per_rollout}: {found}."),
    ] = None  # fmt: skip
    """Samples per optimizer step; all samples of a rollout if not given. An episode is one sample, with
    all its trajectories."""

    max_tokens_per_gpu: Count = 8192
    """Tokens that one rank packs into a micro-batch; a longer sequence gets one of its own."""

    share_prefixes: Annotated[
        Literal["auto", "on", "off"],
        Against(lambda run: run.share_prefixes == "on" and run.megatron_cp > 1 and run.megatron_cp,
            "--megatron-cp={found}: ranks of context parallelism have stretches of whole sequences"),
        Against(lambda run: run.share_prefixes == "on"
            and (not run.plan.starts_aligned or run.plan.is_governed),
            "operators that are not aligned compute a token otherwise where its past is shared",
            "Add --true-on-policy-mode, without --mismatch-governor, or leave it out."),
    ] = "auto"  # fmt: skip
    """Compute once what samples of a micro-batch begin with, as a group's prompt. Log-probabilities keep
    their bits; gradients of shared tokens are summed in another order. auto: on for aligned operators of
    a CPU where a prompt has several samples or an agent, unless something contradicts it; --dry-run says
    what it comes to."""

    rank_invariant: Annotated[
        bool,
        Together(lambda run: run.rank_invariant and _without_order(run),
            "{found}: with --rank-invariant each rank adds the gradients of one micro-batch at a time, "
            "of tokens of its own, and stages of a pipeline or experts on several ranks do not. Leave "
            "one of the two out."),
    ] = False  # fmt: skip
    """Add gradients in the order of the micro-batches, so that the number of data-parallel ranks changes
    no bit; --true-on-policy-mode always does."""

    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""

    moe_activation_checkpointing: Annotated[bool, NO_RESULT] = True
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

    length_decay: Annotated[
        LengthDecayConfig,
        Prefix("length_decay_"),
        ReadBy("--lr-schedule length-decay", lambda run: run.lr_schedule == "length-decay"),
    ] = field(default_factory=LengthDecayConfig)

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

    @property
    def shares_prefixes(self) -> bool:
        """Return whether prefixes are shared, once `auto` is resolved (`run/launch/sharing.py`)."""
        return self.share_prefixes == "on"


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    megatron_tp: Annotated[Count, BY_MEGATRON] = 1
    """Tensor-parallel ranks."""

    megatron_sequence_parallel: Annotated[bool, BY_MEGATRON] = False
    """Tensor-parallel ranks also share the tokens between their layers."""

    megatron_pp: Annotated[Count, BY_MEGATRON] = 1
    """Pipeline stages."""

    megatron_cp: Annotated[Count, BY_MEGATRON] = 1
    """Context-parallel ranks: each computes two stretches of every sequence."""

    megatron_ep: Annotated[Count, BY_MEGATRON] = 1
    """Expert-parallel ranks; taken from the data-parallel ones."""

    megatron_moe_dispatcher: Annotated[Literal["allgather", "alltoall"], BY_MEGATRON] = "alltoall"
    """How tokens come to the ranks of their experts."""

    megatron_distributed_optimizer: Annotated[bool, BY_MEGATRON] = True
    """Data-parallel ranks share the optimizer's state."""
