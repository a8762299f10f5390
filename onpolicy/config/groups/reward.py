"""The flags of rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Literal, get_args

from fallback_correction.ranges import ReadBy, Rule, at_least, at_most
from onpolicy.config.groups.agents import has_agent
from onpolicy.config.groups.inputs import says_rewards
from onpolicy.config.groups.remote_reward import RemoteName, RemoteRewardConfig
from onpolicy.config.kinds import Seconds
from onpolicy.config.rules import NO_RESULT, Against, Parsed, Together
from onpolicy.errors import ConfigError

RuleName = Literal["math", "dapo", "exact"]
RULES: tuple[str, ...] = get_args(RuleName)
REMOTE: tuple[str, ...] = get_args(RemoteName)

FUNCTION = "package.module.function or path/to/file.py:function"


def is_function(source: str) -> bool:
    """Return whether a source of rewards is a user function rather than a built-in rule."""
    return "." in source


def name_of(source: str) -> str:
    """Return the name of a rule's or a function's reward. Example: 'path/to/file.py:brief' -> 'brief'"""
    return source.replace(":", ".").rpartition(".")[2]


def weights_of(rewards: Sequence[str], name: str = "--rewards") -> dict[str, float]:
    """Return the weight of each rule and function of --rewards. Raises ConfigError for anything else."""
    found: dict[str, float] = {}
    for given in rewards:
        source, _, text = given.rpartition("=") if "=" in given else (given, "", "1")
        if source not in RULES + REMOTE and not is_function(source):
            raise ConfigError(
                f"{name}={given}: {source!r} is no rule. Give NAME=WEIGHT with one of "
                f"{', '.join(RULES + REMOTE)}, or with a function: {FUNCTION}."
            )
        try:
            found[source] = float(text)
        except ValueError:
            found[source] = float("nan")
        if not isfinite(found[source]):
            raise ConfigError(f"{name}={given}: {text!r} is no number. Give NAME=WEIGHT.")
    if len({name_of(source) for source in found}) < len(rewards):
        raise ConfigError(
            f"{name}={' '.join(rewards)}: two of them have one name, under which each is logged. "
            "Leave one out, or rename a function."
        )
    return found


def sources_of(one: str, rewards: Sequence[str]) -> dict[str, float]:
    """Return the sources of rewards with their weights: `one` if it is given, else all of `rewards`."""
    return {one: 1.0} if one else weights_of(rewards)


@dataclass(frozen=True, kw_only=True)
class RewardConfig(RemoteRewardConfig):
    rm_type: Annotated[
        Literal["", RuleName, RemoteName],
        Together(lambda run: run.num_rollout and not (
                run.config.reward.sources or has_agent(run) or says_rewards(run)
            ),
            "--rm-type='', --custom-rm-path='', --rewards=(): a run needs exactly one of them. Give "
            "--rm-type with one of its choices, or a function of your own."),
        Against(lambda run: run.custom_rm_path,
            "it stands beside --custom-rm-path={found}, and a run needs exactly one of them"),
    ] = ""  # fmt: skip
    """Rule that scores a response: math (math-verify), dapo ("Answer: ..."), exact; remote_rm: what
    --rm-url answers; judge: what --judge-model says. Not needed where episodes say their rewards
    themselves, nor for problems of reasoning-gym, whose scorer does."""

    custom_rm_path: Annotated[
        str, Rule(lambda x: not x or is_function(x), "names no function. Give " + FUNCTION + ".")
    ] = ""
    """Own rule instead: package.module.function or path/to/file.py:function, which takes a Sample and
    returns a number, or a dict with one under "score" (docs/rewards.md)."""

    rewards: Annotated[
        tuple[str, ...], Parsed(weights_of),
        Against(lambda run: run.rm_type or run.custom_rm_path,
            "they stand beside {found}, and a run needs exactly one of them",
            "Name that one among --rewards."),
    ] = ()  # fmt: skip
    """Several rules and functions instead, each as NAME=WEIGHT: the reward is their weighted sum, and
    each is logged by its name. Without =WEIGHT it is 1; with 0 it is logged alone."""

    group_rm: Annotated[
        bool,
        ReadBy("a function of one's own (--custom-rm-path, --rewards, a set of --eval-config)",
            lambda run: any(
                is_function(source)
                for each in (run.config.reward, *run.config.eval_sets.values())
                for source in each.sources
            )),
    ] = False  # fmt: skip
    """Own functions take the list of all samples of a prompt, and return a list with what one would
    return of each, in their order."""

    rm_time_limit: Seconds = 10.0
    """Seconds of processor time for scoring one response, or one group with --group-rm, and ten times
    that by the clock; after that it is asked once more, and then it could not be scored."""

    rm_workers: Annotated[int, at_least(0), at_most(1024), NO_RESULT] = 0
    """Processes that score; 0: one per core, at least 4 and at most 32. Changes no reward."""

    rm_max_error_rate: Annotated[float, at_least(0), at_most(1), NO_RESULT] = 0.01
    """Share of the samples scored at once that a rule may fail on, or be late with. They are counted,
    and nothing is learnt from them; beyond this share the run ends. 0: at the first."""

    @property
    def sources(self) -> dict[str, float]:
        """Return the rules (by name) and functions (by path) that score, with weights; may be empty."""
        return sources_of(self.rm_type or self.custom_rm_path, self.rewards)

    @property
    def flag(self) -> str:
        """Return the flag that names the sources of rewards."""
        if self.rewards:
            return "--rewards"
        return "--custom-rm-path" if self.custom_rm_path else "--rm-type"
