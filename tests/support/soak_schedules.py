"""What decides in runs of a soak which weights a token comes from, and who asks for tokens."""

from __future__ import annotations

from tests.support.train_runs import FREE

SCHEDULES = {
    "plain": (),
    "lag": ("--rollout-lag", "1", "--global-batch-size", "16"),
    "segments": ("--rollout-lag", "1", "--rollout-segment-tokens", "7"),
    "dynamic": (
        "--dynamic-sampling", "--custom-rm-path", "own_reward.begins_even",
        "--rollout-max-response-len", "60",
    ),
    "free": FREE,
}  # fmt: skip
"""In `free` the clock decides: a replay of its journal says what the hash of such a run is to be."""

AGENT = (
    "--custom-generate-function-path", "own_agent.act_by_tokens", "--agent-workers", "1",
    "--rollout-max-context-len", "240",
)  # fmt: skip
"""One episode that fails ends the run, which goes on with --load as if it had not."""


def flags(schedule: str, agents: bool) -> tuple[str, ...]:
    return (*SCHEDULES[schedule], *(AGENT if agents else ()))
