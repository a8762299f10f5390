"""The plan of a run: its properties, resolved once from its flags, under names that no flag has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MODE = "--true-on-policy-mode"
"""What asks a command but `bench` for aligned operators."""

OnMismatch = Literal["fail", "fall back", "warn", "measure"]
"""What a token with another log-probability in training leads to: the run ends, the rollout is
corrected, the log says so, or the metrics do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The properties of a run of any command (`TrainConfig.plan`, and `plan` of other commands)."""

    starts_aligned: bool = False
    """Whether the first rollout runs on aligned operators."""

    may_align: bool = False
    """Whether a rollout may run on aligned operators: the first, or one after the governor."""

    aligned_by: str = ""
    """What asks for aligned operators, for messages; empty: nothing does."""

    blocks: int = 0
    """Blocks that sums of row-parallel layers are to be cut into; 0: as many as the largest degree."""

    degrees: Mapping[str, int] = field(default_factory=dict)
    """Tensor-parallel degrees that such an order of sums must fit, by the flags that ask for them."""

    starts_servers: bool = True
    """Whether the command starts its servers, or uses running ones, or none."""

    is_governed: bool = False
    """Whether the distance between the engines chooses operators and corrections, rollout by rollout."""

    may_lag: bool = False
    """Whether tokens may come from earlier weights than those that learn from them."""

    corrections: tuple[str, ...] = ()
    """The corrections that the flags ask for, by their switches."""

    weighs_lag: bool = False
    """Whether samples of earlier weights are weighed, since nothing else is done about them."""

    bypasses_lag: bool = False
    """Whether their ratio is to the policy that sampled them instead, as in PPO."""

    may_come_on: tuple[str, ...] = ()
    """Switches whose settings are read though they may be off: those of the governor and of samples that
    lag, and all where a function of the user's own is handed them."""

    on_aligned_mismatch: OnMismatch = "fail"
    on_stock_mismatch: OnMismatch = "measure"

    is_rank_invariant: bool = False
    """Whether the bits of a step are to be the same on any number of trainer ranks."""

    @property
    def is_always_on_policy(self) -> bool:
        """Return whether every rollout runs on aligned operators and the newest weights, uncorrected."""
        falls_back = self.on_aligned_mismatch == "fall back"
        return self.starts_aligned and not (self.is_governed or falls_back or self.may_lag)

    @property
    def row_parallel_blocks(self) -> int:
        """Return the number of blocks of every sum that ranks share."""
        return self.blocks or max(self.degrees.values())

    def on_mismatch(self, *, is_aligned: bool) -> OnMismatch:
        """Return the reaction to a mismatched token under an aligned or another contract."""
        return self.on_aligned_mismatch if is_aligned else self.on_stock_mismatch


def tool_plan(config: Any, *, mode: bool, **more: Any) -> RunPlan:
    """Return the plan of a command with one kind of engines. mode: whether operators are aligned."""
    return RunPlan(
        starts_aligned=mode,
        may_align=mode,
        aligned_by=MODE if mode else "",
        blocks=config.operators.row_parallel_blocks,
        **more,
    )
