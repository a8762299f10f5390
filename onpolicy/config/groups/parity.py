"""The flags of aligned operators, and of the reaction to a mismatch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import above, at_most
from onpolicy.config.rules import NO_RESULT, Against, Facts, Together


def _is_power_of_two(number: int) -> bool:
    return number > 0 and not number & (number - 1)


def _cut_unevenly(run: Facts) -> str | None:
    """Return the first degree whose sums would be no binary tree."""
    degrees = run.plan.degrees.items() if run.plan.may_align else ()
    return next((f"{flag}={n}" for flag, n in degrees if not _is_power_of_two(n)), None)


def _too_few_blocks(run: Facts) -> str | None:
    """Return the largest degree, if the number of blocks is no power of two or is below it."""
    flag = max(run.plan.degrees, key=lambda name: run.plan.degrees[name])
    degree, blocks = run.plan.degrees[flag], run.row_parallel_blocks
    fits = _is_power_of_two(blocks) and blocks >= degree
    return None if fits else f"{flag}={degree}"


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    true_on_policy_mode: bool = False
    """Run both engines on aligned operators and check that every log-probability agrees bitwise."""

    parity_policy: Annotated[
        Literal["fail", "warn", "fallback"] | None,
        Against(lambda run: run.parity_policy == "fallback" and not run.plan.may_align,
            "without aligned operators every rollout is corrected anyway",
            "Add --true-on-policy-mode, or give --use-tis without it."),
        Against(lambda run: run.parity_policy == "fallback" and not run.plan.corrections,
            "needs a correction to fall back to",
            "Add --use-tis, --use-rs, --dc-mode or --custom-tis-function-path."),
    ] = None  # fmt: skip
    """On a mismatch: stop before the backward pass, log it, or train on the rollout with the
    correction that the other flags ask for. Default: fail in the mode above, else warn."""

    redraw_share: Annotated[
        float, above(0), at_most(1), NO_RESULT,
        Against(lambda run: not run.plan.may_align,
            "without aligned operators no token is drawn again",
            "Add --true-on-policy-mode, or leave it out."),
    ] = 1.0  # fmt: skip
    """In the mode above the trainer draws this share of the sampled tokens again, by their requests'
    seeds, and stops unless it draws the same tokens. --seed decides which; a probe and `onpolicy verify`
    draw all of theirs."""


@dataclass(frozen=True, kw_only=True)
class OperatorsConfig:
    row_parallel_blocks: Annotated[
        int,
        Against(lambda run: not run.plan.may_align,
            "without aligned operators each engine sums in an order of its own",
            "Leave it out, or add --true-on-policy-mode."),
        Together(_cut_unevenly,
            "{found}: must be a power of two with --true-on-policy-mode, since sums over ranks are a "
            "binary tree there. Choose 1, 2, 4 or 8."),
        Against(_too_few_blocks,
            "must be a power of two and at least {found}",
            "Choose such a number, or leave the flag out."),
    ] = 0  # fmt: skip
    """Blocks into which aligned layers that tensor parallelism shares out cut their sums: a power of
    two. Runs with the same number have the same bits at any degree up to it. 0: the largest degree."""

    operators: Annotated[
        Literal[
            "auto", "cpu", "onednn", "portable", "triton", "hopper", "hopper_fp8", "deep_gemm",
        ],
        Against(lambda run: not run.plan.may_align,
            "without --true-on-policy-mode each engine runs its own operators",
            "Add it, or leave the flag out."),
    ] = "auto"  # fmt: skip
    """Aligned operators. On a GPU: hopper (FlashAttention-3 and DeepGEMM; H100 and H200, bfloat16),
    hopper_fp8 (the same, and linears multiply bytes, for --rollout-weight-format fp8_e4m3_block128 with
    --rollout-activation-format fp8_e4m3), triton (A100 to H200, also float32) or deep_gemm (triton with
    DeepGEMM's products; H100 and H200, bfloat16). On a CPU: cpu (products in float32), onednn (products
    by the CPU's bfloat16 instructions) or portable (made to have the same bits on any x86-64 processor
    with AVX2). auto: hopper where it can, else triton; cpu."""

    @property
    def is_portable(self) -> bool:
        """Return whether all computation of a run, the optimizer step included, has the same bits on
        every x86-64 processor with AVX2."""
        return self.operators == "portable"
