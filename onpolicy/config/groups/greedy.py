"""The rule about settings that do not fit a comparison with a greedy answer."""

from onpolicy.config.groups.agents import has_agent
from onpolicy.config.rules import Against, Facts


def _misfit(run: Facts) -> str:
    """Return the reason why a run cannot compare with a greedy answer; "" if it can, or does not."""
    if not run.config.compares_with_greedy:
        return ""
    reasons = {
        "with --rollout-schedule free the clock decides which weights a token comes from, and the "
        "greedy answer must come from those of its group": run.rollout_schedule == "free",
        "with --rollout-segment-tokens an answer may come from several weights, and the greedy one must "
        "come from those of its group": run.rollout_segment_tokens > 0,
        "with --group-rm a reward depends on the samples beside it, and the greedy answer is none of "
        "them": run.group_rm,
        "--overlong-buffer-len takes something off the rewards of samples, and not off that of the "
        "greedy answer": run.overlong_buffer_len > 0,
        "an episode of an agent may fail, and samples whose greedy one has failed have nothing to be "
        "compared with": has_agent(run),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


MISFIT = Against(_misfit, "{found}", "Leave one of the two out.")
