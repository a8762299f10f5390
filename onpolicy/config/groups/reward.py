"""What scores a response."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import at_least, at_most
from onpolicy.config.groups.agents import has_agent
from onpolicy.config.groups.inputs import says_rewards
from onpolicy.config.kinds import Seconds
from onpolicy.config.rules import NO_RESULT, Against, Together


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    rm_type: Annotated[
        Literal["", "math", "dapo", "exact"],
        Together(lambda run: not (
                run.rm_type or run.custom_rm_path or has_agent(run) or says_rewards(run)
            ),
            "--rm-type='', --custom-rm-path='': a run needs exactly one of them. Give --rm-type math, "
            "dapo or exact, or a function of your own."),
        Against(lambda run: run.custom_rm_path,
            "it stands beside --custom-rm-path={found}, and a run needs exactly one of them"),
    ] = ""  # fmt: skip
    """Rule that scores a response: math (math-verify), dapo ("Answer: ..."), exact. Not needed where
    episodes say their rewards themselves, nor for problems of reasoning-gym, whose scorer does."""

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
