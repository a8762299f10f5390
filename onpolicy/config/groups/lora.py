"""Low-rank adapters: what is trained in the place of the model's own weights."""

from dataclasses import dataclass
from typing import Annotated

from fallback_correction.ranges import ReadBy
from onpolicy.config.kinds import CountOrZero, Positive
from onpolicy.config.rules import Against

BY_LORA = ReadBy("--lora-rank", lambda run: run.lora_rank > 0)

NOT_MERGED = Against(
    lambda run: not run.plan.starts_aligned,
    "stock servers have no adapters beside their linears that could be recorded",
    "Add --true-on-policy-mode, or ask `onpolicy verify` how far merged weights are apart.",
)

NOT_RECORDED = Against(
    lambda run: run.train_backend == "megatron",
    "what adapters add to Megatron's linears is not recorded",
    "Use --train-backend fsdp, or ask `onpolicy verify`, which takes it, whether a token differs.",
)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    lora_rank: Annotated[
        CountOrZero,
        Against(lambda run: run.plan.is_governed,
            "stock servers have adapters merged and aligned ones beside their weights, and no run goes "
            "from one to the other yet",
            "Leave --mismatch-governor out."),
        Against(lambda run: run.align,
            "engines that --align aligns in part have no adapters here",
            "Leave --align out, or use --true-on-policy-mode."),
        Against(lambda run: not run.plan.starts_aligned and run.rollout_weight_format,
            "servers without --true-on-policy-mode get adapters merged, and on the grid of "
            "--rollout-weight-format most of their update would be lost",
            "Add --true-on-policy-mode, or leave --rollout-weight-format out."),
        Against(lambda run: run.plan.starts_aligned and run.rollout_server_url,
            "servers that run already (--rollout-server-url) were started without adapters",
            "Let the run start its servers, or leave --lora-rank out."),
    ] = 0  # fmt: skip
    """Train low-rank adapters of this rank beside frozen linears (LoRA), in the place of all weights; 0:
    all weights. With --true-on-policy-mode both engines compute them; else each push gives the servers
    weights that they are merged into."""

    lora_alpha: Annotated[Positive, BY_LORA] = 32.0
    """What an adapter adds is multiplied by lora_alpha / lora_rank."""

    lora_rslora: Annotated[bool, BY_LORA] = False
    """Multiply by lora_alpha / sqrt(lora_rank) instead (rsLoRA)."""

    lora_dora: Annotated[bool, BY_LORA,
        Against(lambda run: run.train_backend == "megatron",
            "Megatron's linears have no magnitudes here", "Use --train-backend fsdp."),
    ] = False  # fmt: skip
    """Train the length of each row of an adapted weight too, beside its direction (DoRA)."""

    lora_target_modules: Annotated[str, BY_LORA] = "all-linear"
    """Linears that are adapted: all-linear, which is every one and all experts, but no router and not
    the output projection, or the last parts of their names, as in q_proj,experts,lm_head."""

    lora_adapter: Annotated[str, BY_LORA] = ""
    """Begin with an adapter in PEFT's format, such as step_N/hf of another run: the directory. It says
    rank, alpha, rsLoRA, DoRA and targets, so --lora-rank and the others are left out."""

    @property
    def scale(self) -> float:
        """What the product with both factors is multiplied by."""
        root = 0.5 if self.lora_rslora else 1.0
        return float(self.lora_alpha / self.lora_rank**root)
