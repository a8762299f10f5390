"""The flags of aligned operators, and of the reaction to a mismatch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from onpolicy.config.rules import Against, Facts, Together


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


NEEDS_EQUAL_BITS = Against(
    lambda run: not run.plan.may_align,
    "without aligned operators no two rows of log-probabilities have the same bits",
    "Add --true-on-policy-mode, or leave the flag out.",
)


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    true_on_policy_mode: bool = False
    """Run both engines on aligned operators. Each step then checks that all log-probabilities of rollout
    and training agree bit for bit, and that the trainer draws the same tokens by the same seeds."""

    parity_policy: Annotated[
        Literal["fail", "warn", "fallback"] | None,
        Against(lambda run: run.parity_policy == "fallback" and not run.plan.may_align,
            "without aligned operators every rollout is corrected anyway",
            "Add --true-on-policy-mode, or give --use-tis without it."),
        Against(lambda run: run.parity_policy == "fallback" and not run.plan.corrections,
            "needs a correction to fall back to",
            "Add --use-tis, --use-rs, --dc-mode or --custom-tis-function-path."),
    ] = None  # fmt: skip
    """Reaction to a mismatch between rollout and training: `fail` ends the run before the backward pass,
    `warn` logs it, `fallback` trains on the rollout with the corrections that other flags select. The
    default is fail with --true-on-policy-mode, and warn without it."""

    parity_check: Annotated[Literal["sampled", "full"], NEEDS_EQUAL_BITS] = "sampled"
    """Log-probabilities that are compared: those of the `sampled` tokens, or in `full` also the whole
    vocabulary's at every sampled token, by digests, before top-k, top-p, min-p and grammars. Servers of
    --rollout-server-url are started with --row-digests then."""


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
    """Number of blocks into which row-parallel layers cut their sums, a power of two. Runs with the same
    number have the same bits at every tensor-parallel size up to it. 0 takes the largest tensor-parallel
    size of the run."""

    operators: Annotated[
        Literal[
            "auto", "cpu", "onednn", "portable", "triton", "hopper", "hopper_fp8", "cublaslt",
            "deep_gemm",
        ],
        Against(lambda run: not run.plan.may_align,
            "without --true-on-policy-mode each engine runs its own operators",
            "Add it, or leave the flag out."),
    ] = "auto"  # fmt: skip
    """Aligned operators. On GPUs: `hopper` (FlashAttention-3 and DeepGEMM; H100 and H200, bfloat16),
    `hopper_fp8` (the same with FP8 products, for --rollout-weight-format fp8_e4m3_block128 with
    --rollout-activation-format fp8_e4m3), `cublaslt` (hopper with cuBLASLt's products), `triton` (A100
    to H200, also float32), `deep_gemm` (triton with DeepGEMM products; H100 and H200, bfloat16). On
    CPUs: `onednn` (bfloat16 products by the CPU's own instructions), `cpu` (float32 products),
    `portable` (the same bits on any x86-64 CPU with AVX2). `auto` takes the first that can run of
    hopper and triton, on CPUs of onednn and cpu."""

    @property
    def is_portable(self) -> bool:
        """Return whether a run has the same bits on every x86-64 processor with AVX2."""
        return self.operators == "portable"
