"""Who acts in an episode, and what becomes of one that fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import ReadBy, above, at_least, at_most
from onpolicy.config.rules import Against, Facts


def has_agent(run: Facts | AgentConfig) -> bool:
    """Whether anybody but the policy decides what an episode is made of."""
    return bool(run.custom_generate_function_path)


BY_AGENT = ReadBy("--custom-generate-function-path", has_agent)


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    custom_generate_function_path: str = ""
    """Own function that rolls prompts out: package.module.function or path/to/file.py:function, an
    `async def function(turns, prompt)` (docs/agents.md)."""

    rollout_max_context_len: Annotated[
        int | None, at_least(2), BY_AGENT,
        Against(lambda run: run.rollout_max_context_len <= run.rollout_max_response_len,
            "a prompt and --rollout-max-response-len={run.rollout_max_response_len} do not fit",
            "Raise the one, or lower the other."),
    ] = None  # fmt: skip
    """Most tokens of a sequence, given and sampled; the model's context if not given. Beyond it the
    function gets a ContextExceededError."""

    episode_time_limit: Annotated[float | None, above(0), at_most(1e9), BY_AGENT] = None
    """Seconds that an episode may take besides sampling, before it counts as failed; no limit if not
    given."""

    episode_failures: Annotated[Literal["drop", "retry", "stop"], BY_AGENT] = "stop"
    """What becomes of an episode whose function raises, returns nonsense or takes too long. drop: its
    group is learnt from without it. retry: it begins anew with other seeds, three times at most, and is
    dropped then. stop: the run ends and says why. All are counted, and none is given a reward."""
