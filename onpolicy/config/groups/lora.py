"""Low-rank adapters: what is trained in the place of the model's own weights."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fallback_correction.ranges import ReadBy
from onpolicy.config.kinds import CountOrZero, Positive
from onpolicy.config.rules import NO_RESULT, Against, Parsed
from onpolicy.errors import ConfigError

BY_LORA = ReadBy("--lora-rank", lambda run: run.lora_rank > 0)

NOT_MERGED = Against(
    lambda run: not run.plan.starts_aligned,
    "servers that are not aligned whole have no adapters beside their linears that could be recorded",
    "Add --true-on-policy-mode, or ask `onpolicy verify` how far merged weights are apart.",
)


_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def require_names(names: str | Sequence[str]) -> None:
    """Raise ConfigError for what is no name of adapters, or stands there twice."""
    given = [names] if names and isinstance(names, str) else list(names)
    for name in given:
        rule = (
            "a name has 1 to 64 letters, digits, - and _" if not _NAME.fullmatch(name)
            else "is there twice" if given.count(name) > 1
            else ""
        )  # fmt: skip
        if rule:
            flag = "--lora-name" if isinstance(names, str) else "--lora-names"
            raise ConfigError(f"{flag}: {name!r}: {rule}. Give names such as math and code-2.")


@dataclass(frozen=True, kw_only=True)
class AdapterShapeConfig:
    """What adapters are, whoever trains them."""

    lora_rank: CountOrZero = 0

    lora_alpha: Annotated[Positive, BY_LORA] = 32.0
    """What an adapter adds is multiplied by lora_alpha / lora_rank."""

    lora_rslora: Annotated[bool, BY_LORA] = False
    """Multiply by lora_alpha / sqrt(lora_rank) instead (rsLoRA)."""

    lora_target_modules: Annotated[str, BY_LORA] = "all-linear"
    """Linears that are adapted: all-linear, which is every one and all experts, but no router and not
    the output projection, or the last parts of their names, as in q_proj,experts,lm_head."""

    lora_dora: Annotated[bool, BY_LORA] = False
    """The rows of what is adapted have lengths of their own (DoRA)."""

    @property
    def scale(self) -> float:
        """What the product with both factors is multiplied by."""
        root = 0.5 if self.lora_rslora else 1.0
        return float(self.lora_alpha / self.lora_rank**root)


@dataclass(frozen=True, kw_only=True)
class LoraConfig(AdapterShapeConfig):
    lora_rank: Annotated[
        CountOrZero,
        Against(lambda run: run.rollout_weight_format
                and (run.plan.is_governed or not run.plan.starts_aligned),
            "stock servers get adapters merged, and on the grid of --rollout-weight-format most of "
            "their update would be lost",
            "Use --true-on-policy-mode without --mismatch-governor, or leave --rollout-weight-format "
            "out."),
        Against(lambda run: run.plan.starts_aligned and run.rollout_server_url and not run.lora_name,
            "servers that run already (--rollout-server-url) hold adapters by their names alone",
            "Start them by `onpolicy serve --lora-names`, and add --lora-name; or let the run start its "
            "servers, or leave --lora-rank out."),
    ] = 0  # fmt: skip
    """Train low-rank adapters of this rank beside frozen linears (LoRA), in the place of all weights; 0:
    all weights. Aligned engines compute them as the trainer does (--true-on-policy-mode); others get
    weights that they are merged into, with every push."""

    lora_dora: Annotated[bool, BY_LORA,
        Against(lambda run: run.train_backend == "megatron" and run.dtype == "bfloat16"
                and not run.megatron_distributed_optimizer,
            "Megatron's whole optimizer writes no checkpoint of float32 magnitudes beside bfloat16",
            "Leave --no-megatron-distributed-optimizer out."),
    ] = False  # fmt: skip
    """Train the length of each row of an adapted weight too, beside its direction (DoRA)."""

    train_pack_weights: Annotated[
        bool,
        NO_RESULT,
        Against(lambda run: not run.lora_rank,
            "what is trained is kept in float32, and without adapters that is everything",
            "Add --lora-rank."),
        Against(lambda run: run.rollout_weight_format in ("", "bf16") or run.plan.is_governed
            or not run.plan.starts_aligned,
            "the trainer's weights are not rounded to 8 bits or fewer, so there is nothing to pack",
            "Add --true-on-policy-mode --rollout-weight-format, without --mismatch-governor."),
        Against(lambda run: run.train_backend != "fsdp",
            "Megatron-core's modules hold weights as they compute with them",
            "Add --train-backend fsdp, or leave the flag out."),
    ] = False  # fmt: skip
    """Keep the base that adapters are beside as codes of 4 or 8 bits and scales (QLoRA), and unpack a
    layer's while it computes. Changes no result."""

    lora_adapter: Annotated[str, BY_LORA] = ""
    """Begin with an adapter in PEFT's format, such as step_N/hf of another run: the directory. It says
    rank, alpha, rsLoRA, DoRA and targets, so --lora-rank and the others are left out."""

    lora_name: Annotated[
        str,
        BY_LORA,
        NO_RESULT,
        Parsed(require_names),
        Against(lambda run: not run.plan.starts_aligned,
            "servers without it hold no adapters, by names or without", "Add --true-on-policy-mode."),
        Against(lambda run: not run.rollout_server_url,
            "servers of the run's own have its adapters alone, which need no name",
            "Add --rollout-server-url, or leave it out."),
        Against(lambda run: run.weight_sync not in ("auto", "tensor"),
            "--weight-sync={run.weight_sync} has no place for a name", "Use --weight-sync tensor."),
    ] = ""  # fmt: skip
    """Which of the adapters on servers of --rollout-server-url are this run's: a name of their
    --lora-names. Runs of other names sample there at the same time."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedLoraConfig(AdapterShapeConfig):
    lora_rank: CountOrZero = 0
    """Rank of the adapters of --lora-name."""

    lora_name: str = ""
    """Evaluate what a run has pushed under this name to servers of --rollout-server-url: a name of their
    --lora-names. CHECKPOINT is the base that they hold."""


@dataclass(frozen=True, kw_only=True)
class ServedLoraConfig(AdapterShapeConfig):
    lora_names: Annotated[
        tuple[str, ...],
        Parsed(require_names),
        Against(lambda run: not run.lora_rank, "says no rank of the adapters", "Add --lora-rank."),
        Against(lambda run: not run.true_on_policy_mode,
            "SGLang's own kernels have no adapters here", "Leave --no-true-on-policy-mode out."),
        Against(lambda run: run.sessions, "a session says no name"),
    ] = ()  # fmt: skip
    """Names under which each server holds adapters beside one base, for runs with --lora-name; each of
    them trains its own. Requests say theirs as lora_path."""

    lora_rank: Annotated[
        CountOrZero, ReadBy("--lora-names", lambda run: run.lora_names)
    ] = 0  # fmt: skip
    """Rank of the adapters of --lora-names, of one shape for all."""

    lora_adapter: ClassVar[str] = ""
