"""The flags of the training engines, their optimizer, and low-rank adapters."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from fallback_correction.config import LengthDecayConfig, SurgeDetectorConfig
from fallback_correction.ranges import ReadBy, at_least
from onpolicy.config.flags import Prefix, no_flags
from onpolicy.config.kinds import Count, CountOrZero, Momentum, NonNegative, Positive
from onpolicy.config.rules import Against, Facts

TrainBackend = Literal["fsdp", "megatron"]
BY_MEGATRON = ReadBy("--train-backend megatron", lambda run: "megatron" in run.train_backend)


def _indivisible(run: Facts) -> str | None:
    """Return the possible sizes of optimizer steps, if the requested one is not among them."""
    samples = run.config.samples_per_rollout
    divisors = (str(d) for d in range(1, samples + 1) if samples % d == 0)
    return ", ".join(divisors) if samples % run.global_batch_size else None


OF_SURGES = [f"length_decay_{field.name}" for field in fields(SurgeDetectorConfig)]


@no_flags(
    "adam_beta1", "adam_eps",
    "length_decay_factor", "length_decay_onset_multiplier", "length_decay_floor", *OF_SURGES,
)  # fmt: skip
@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    train_backend: TrainBackend = "fsdp"
    """Training engine: PyTorch's FSDP2, or Megatron-core, which the --megatron-* flags configure."""

    global_batch_size: Annotated[
        int | None, at_least(1), Against(_indivisible,
            "rollout_batch_size {run.rollout_batch_size} x n_samples_per_prompt "
            "{run.n_samples_per_prompt} = {run.config.samples_per_rollout} samples must be "
            "global_batch_size x a whole number of optimizer steps",
            "Divisors of {run.config.samples_per_rollout}: {found}."),
    ] = None  # fmt: skip
    """Number of samples per optimizer step. By default a rollout is one optimizer step. An episode
    counts as one sample, whatever its number of trajectories."""

    max_tokens_per_gpu: Count = 8192
    """Number of tokens that a rank packs into a micro-batch. A longer sequence gets a micro-batch of its
    own."""

    share_prefixes: Annotated[
        Literal["auto", "on", "off"],
        Against(lambda run: run.share_prefixes == "on" and run.megatron_cp > 1 and run.megatron_cp,
            "--megatron-cp={found}: ranks of context parallelism have stretches of whole sequences"),
        Against(lambda run: run.share_prefixes == "on"
            and (not run.plan.starts_aligned or run.plan.is_governed),
            "operators that are not aligned compute a token otherwise where its past is shared",
            "Add --true-on-policy-mode, without --mismatch-governor, or leave it out."),
        Against(lambda run: run.share_prefixes == "on" and run.images,
            "a prefix with images is computed for each sample"),
    ] = "auto"  # fmt: skip
    """Compute a prefix that samples of a micro-batch share, such as the prompt of a group, only once.
    Log-probabilities keep their bits, but gradients of shared tokens are summed in another order. `auto`
    turns it on for aligned operators on a CPU if a prompt has several samples or an agent and no other
    flag forbids it. --dry-run shows what auto chose."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory. Mixtures of experts always do, because
    they would keep about 0.5 MB per token and layer at the sizes of Qwen3-30B-A3B."""

    lr: NonNegative = 1e-6
    """Peak learning rate of AdamW."""

    lr_warmup_steps: CountOrZero = 0
    """Number of optimizer steps over which the learning rate rises linearly from 0."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up. `linear` and `cosine` reach 0 at the end of the
    run."""

    lr_schedule: Literal["", "length-decay", "ess"] = ""
    """`length-decay` also halves the learning rate at intervals that depend on when the response length
    surges (docs/length_decay.md). `ess` multiplies it at each optimizer step by the root of the weights'
    effective sample size, as a share of their number (VCPO)."""

    length_decay: Annotated[
        LengthDecayConfig,
        Prefix("length_decay_"),
        ReadBy("--lr-schedule length-decay", lambda run: run.lr_schedule == "length-decay"),
    ] = field(default_factory=LengthDecayConfig)

    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of AdamW."""

    adam_beta1: Momentum = 0.9
    """Decay of AdamW's first moment."""

    adam_beta2: Momentum = 0.95
    """Decay of AdamW's second moment."""

    adam_eps: Positive = 1e-8
    """Constant that AdamW adds to the square root of the second moment."""

    clip_grad: NonNegative = 1.0
    """Largest gradient norm. Larger gradients are scaled down to it. 0 turns clipping off."""

    @property
    def shares_prefixes(self) -> bool:
        """Return whether prefixes are shared, once `auto` is resolved (`fit_sharing`)."""
        return self.share_prefixes == "on"


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    megatron_tp: Annotated[Count, BY_MEGATRON] = 1
    """Tensor-parallel size."""

    megatron_sequence_parallel: Annotated[bool, BY_MEGATRON] = False
    """Shard activations between tensor-parallel layers along the sequence."""

    megatron_pp: Annotated[Count, BY_MEGATRON] = 1
    """Pipeline-parallel size."""

    megatron_cp: Annotated[Count, BY_MEGATRON] = 1
    """Context-parallel size. Each rank computes two stretches of every sequence."""

    megatron_ep: Annotated[Count, BY_MEGATRON] = 1
    """Expert-parallel size. The ranks are taken from the data-parallel ones."""


BY_LORA = ReadBy("--lora-rank", lambda run: run.lora_rank > 0)

NOT_MERGED = Against(
    lambda run: not run.plan.starts_aligned,
    "servers that are not aligned have no adapters beside their linears that could be recorded",
    "Add --true-on-policy-mode, or ask `onpolicy verify` how far merged weights are apart.",
)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    lora_rank: Annotated[
        CountOrZero,
        Against(lambda run: run.rollout_weight_format
                and (run.plan.is_governed or not run.plan.starts_aligned),
            "stock servers get adapters merged, and on the grid of --rollout-weight-format most of "
            "their update would be lost",
            "Use --true-on-policy-mode without --mismatch-governor, or leave --rollout-weight-format "
            "out."),
        Against(lambda run: run.plan.starts_aligned and run.rollout_server_url,
            "servers that run already (--rollout-server-url) were started without adapters",
            "Let the run start its servers, or leave --lora-rank out."),
    ] = 0  # fmt: skip
    """Train low-rank adapters of this rank on frozen weights (LoRA). With --true-on-policy-mode both
    engines compute with the adapters; otherwise every push merges them into the weights that it sends. 0
    trains all weights."""

    lora_alpha: Annotated[Positive, BY_LORA] = 32.0
    """Scale of the adapters: their output is multiplied by lora_alpha / lora_rank."""

    lora_rslora: Annotated[bool, BY_LORA] = False
    """Multiply by lora_alpha / sqrt(lora_rank) instead (rsLoRA)."""

    lora_target_modules: Annotated[str, BY_LORA] = "all-linear"
    """Linear layers with adapters: `all-linear` (every linear layer and all experts, but neither routers
    nor the output projection), or the last parts of their names, as in q_proj,experts,lm_head."""

    lora_adapter: Annotated[str, BY_LORA] = ""
    """Directory of a PEFT adapter to begin with, such as step_N/hf of another run. It determines the
    rank, alpha, rsLoRA and target modules, so leave the other --lora-* flags out."""

    @property
    def scale(self) -> float:
        """Return the factor on the product of an adapter's two matrices."""
        root = 0.5 if self.lora_rslora else 1.0
        return float(self.lora_alpha / self.lora_rank**root)
