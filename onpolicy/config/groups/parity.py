"""Aligned operators, and what a mismatch leads to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import Rule
from onpolicy.contract import KINDS

KNOWN_KINDS = Rule(
    lambda x: not x or set(x.split(",")) <= set(KINDS),
    f"must be kinds of operators with commas between them, of {', '.join(KINDS)}. Give some of them.",
)


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    true_on_policy_mode: bool = False
    """Run both engines on aligned operators and check that every log-probability agrees bitwise."""

    parity_policy: Literal["fail", "warn", "fallback"] | None = None
    """On a mismatch: stop before the backward pass, log it, or train on the rollout with the
    correction that the other flags ask for. Default: fail in the mode above, else warn."""


@dataclass(frozen=True, kw_only=True)
class OperatorsConfig:
    row_parallel_blocks: int = 0
    """Blocks into which aligned layers that tensor parallelism shares out cut their sums: a power of
    two. Runs with the same number have the same bits at any degree up to it. 0: the largest degree."""

    operators: Literal["auto", "cpu", "onednn", "portable", "triton", "hopper"] = "auto"
    """Aligned operators. On a GPU: hopper (FlashAttention-3 and DeepGEMM; H100 and H200, bfloat16) or
    triton (A100 to H200, also float32). On a CPU: cpu (products in float32), onednn (products by the
    CPU's bfloat16 instructions) or portable (made to have the same bits on any x86-64 processor with
    AVX2). auto: hopper where it can, else triton; cpu."""

    align: Annotated[str, KNOWN_KINDS] = ""
    """Align these kinds alone, as in linear,attention, and leave all else to each engine: model (the
    code between operators, which comes with every other kind), linear, attention, norm, rotary,
    activation, experts, log_probs. Parity is measured then, and not promised. For fsdp, without
    --true-on-policy-mode."""

    @property
    def is_portable(self) -> bool:
        """Whether all that a run computes, the optimizer's step too, is made to have the same bits on
        every x86-64 processor with AVX2."""
        return self.operators == "portable"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those of --align, in the order of KINDS; empty without it."""
        asked = {"model", *self.align.split(",")} if self.align else set()
        return tuple(kind for kind in KINDS if kind in asked)
