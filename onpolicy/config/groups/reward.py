"""What scores a response."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import at_least, at_most
from onpolicy.config.kinds import Seconds
from onpolicy.config.rules import NO_RESULT, Together


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    rm_type: Annotated[
        Literal["", "math", "dapo", "exact"],
        Together(lambda run: bool(run.rm_type) == bool(run.custom_rm_path) and not run.environment,
            "--rm-type={run.rm_type!r}, --custom-rm-path={run.custom_rm_path!r}: a run needs exactly "
            "one of them. Give --rm-type math, dapo or exact, or a function of your own."),
    ] = ""  # fmt: skip
    """Rule that scores a response: math (math-verify), dapo ("Answer: ..."), exact."""

    custom_rm_path: str = ""
    """Own rule instead: package.module.function or path/to/file.py:function, which takes a Sample and
    returns a number, or a dict with one under "score" (docs/rewards.md)."""

    rm_time_limit: Seconds = 10.0
    """Seconds for scoring one response; after that its reward is 0 and the timeout is counted."""

    rm_workers: Annotated[int, at_least(0), at_most(1024), NO_RESULT] = 0
    """Processes that score; 0: one per core, at least 4 and at most 32. Changes no reward."""

    rm_max_error_rate: Annotated[float, at_least(0), at_most(1), NO_RESULT] = 0.01
    """Share of the samples scored at once that the rule may fail on. They get the reward 0 and are
    counted; beyond this share the run ends. 0: at the first."""
