"""The flags of rewards: rules and functions, or a reward service and a model as a judge, over HTTP."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Literal, get_args

from fallback_correction.ranges import ReadBy, Rule, at_least, at_most
from onpolicy.config.groups.agent_flags import has_agent
from onpolicy.config.groups.input_flags import says_rewards
from onpolicy.config.kinds import Count, CountOrZero, HeaderText, Seconds
from onpolicy.config.rules import NO_RESULT, Against, Facts, Parsed, Together, secret
from onpolicy.errors import ConfigError

RemoteName = Literal["remote_rm", "judge"]


def asks(source: str) -> ReadBy:
    """Return the note on a flag that only one of RemoteName reads."""
    return ReadBy(
        f"--rm-type {source}, --rewards with it, or a set of --eval-config",
        lambda run: is_asked(run, source),
    )


def is_asked(run: Facts, source: str) -> bool:
    """Return whether `source` scores the run's samples, or an evaluation set's."""
    config = run.config
    return source in config.reward.sources or any(
        source in each.sources for each in config.eval_sets.values()
    )


def is_url(text: str) -> bool:
    """Return whether a text begins like the address of a service."""
    return text.startswith(("http://", "https://"))


def _require_verdict(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(
            f"--judge-verdict={pattern}: is no regular expression ({error}). Correct it."
        ) from error
    if groups != 1:
        raise ConfigError(
            f"--judge-verdict={pattern}: has {groups} groups, and the number is read from the only one. "
            "Put parentheses around the number, and (?:...) around the rest."
        )


SCORE = (
    r"(?is)score(?:\s*[(\[][^()\[\]]*[)\]](?=\W*[:=]))?"  # maybe with its range, in brackets
    r"\W*?(?<![\d.,\u2212\u2013])([-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?)"
    r"(?![\w%]|[.,]\d|[ \xa0\u202f]\d|-\w)"  # the number goes on
    r"(?!\s*(?:%|percent)|\s*(?:[-\u2013/:]|to|(?:out )?of)\s*\d)"  # or is part of a fraction or a range
    r"(?!.*score\W*\d)"  # and no other score comes later, be it one that cannot be read
)
"""Finds the number after the word "score", whole. It finds nothing in 7/10, 70 % and 1,000, which may be
read as one number or another."""

BY_REMOTE, BY_JUDGE = asks("remote_rm"), asks("judge")
ANY = ReadBy(
    "--rm-type remote_rm or judge, --rewards or a set of --eval-config with one of them, or "
    "--teacher-url",
    lambda run: any(is_asked(run, name) for name in get_args(RemoteName)) or run.teacher_url,
)
URL = Rule(
    lambda x: not x or is_url(x),
    "is no address. Give one that begins with http:// or https://.",
)
NO_URL = Together(
    lambda run: is_asked(run, "remote_rm") and not run.rm_url,
    "--rm-url='': remote_rm needs the address of what scores. Give it.",
)
INCOMPLETE_JUDGE = Together(
    lambda run: (
        is_asked(run, "judge") and not (run.judge_url and run.judge_model and run.judge_prompt)
    ),
    "--judge-url={run.judge_url!r}, --judge-model={run.judge_model!r}, --judge-prompt="
    "{run.judge_prompt!r}: judge needs all three. Give them.",
)


@dataclass(frozen=True, kw_only=True)
class RemoteRewardConfig:
    rm_url: Annotated[str, URL, BY_REMOTE, NO_URL] = ""
    """URL that samples are sent to with --rm-type remote_rm (docs/rewards.md describes the protocol)."""

    rm_api_key: Annotated[HeaderText, secret("--rm-api-key"), BY_REMOTE, NO_RESULT] = ""
    """API key of that service, or @FILE to read it from a file."""

    rm_concurrency: Annotated[Count, at_most(1024), ANY, NO_RESULT] = 16
    """Largest number of requests in flight."""

    rm_retries: Annotated[CountOrZero, at_most(20), ANY, NO_RESULT] = 3
    """Number of times that a request is repeated, after growing pauses, if it fails with a timeout, HTTP
    429 or HTTP 5xx."""

    rm_request_timeout: Annotated[Seconds, ANY, NO_RESULT] = 60.0
    """Seconds that a request may take."""

    judge_url: Annotated[str, URL, BY_JUDGE] = ""
    """Base URL of the OpenAI-compatible server for --rm-type judge, such as http://host:8000/v1."""

    judge_model: Annotated[str, BY_JUDGE] = ""
    """Name of the judge model on that server."""

    judge_api_key: Annotated[HeaderText, secret("--judge-api-key"), BY_JUDGE, NO_RESULT] = ""
    """API key of that server, or @FILE to read it from a file."""

    judge_prompt: Annotated[str, BY_JUDGE, INCOMPLETE_JUDGE] = ""
    """File with the prompt for the judge. {prompt} (all messages), {question} (the last user message),
    {response} and {label} are replaced by the sample's."""

    judge_verdict: Annotated[str, Parsed(_require_verdict), BY_JUDGE] = SCORE
    """Regular expression with one group, whose last match in the judge's answer is the reward. The
    default finds the number in `Score: 7`."""

    judge_max_tokens: Annotated[Count, BY_JUDGE] = 2048
    """Largest number of tokens in the judge's answer, including its reasoning. A longer answer counts as
    failed."""


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
    """Rule that scores a response: `math` (math-verify), `dapo` ("Answer: ..."), `exact` (string match),
    `remote_rm` (a service at --rm-url) or `judge` (a model at --judge-url). Leave it out if episodes
    return rewards themselves, and for reasoning-gym, which has its own scorer."""

    custom_rm_path: Annotated[
        str, Rule(lambda x: not x or is_function(x), "names no function. Give " + FUNCTION + ".")
    ] = ""
    """Your own reward function instead: package.module.function or path/to/file.py:function. It takes a
    Sample and returns a number, or a dict with one under "score" (docs/rewards.md)."""

    rewards: Annotated[
        tuple[str, ...], Parsed(weights_of),
        Against(lambda run: run.rm_type or run.custom_rm_path,
            "they stand beside {found}, and a run needs exactly one of them",
            "Name that one among --rewards."),
    ] = ()  # fmt: skip
    """Several rules and functions, each as NAME=WEIGHT. The reward is their weighted sum, and each is
    logged under its name. The default weight is 1; with weight 0 a reward is only logged."""

    group_rm: Annotated[
        bool,
        ReadBy("a function of one's own (--custom-rm-path, --rewards, a set of --eval-config)",
            lambda run: any(
                is_function(source)
                for each in (run.config.reward, *run.config.eval_sets.values())
                for source in each.sources
            )),
    ] = False  # fmt: skip
    """Call your own reward functions with the list of all samples of a prompt. They return a list of
    results in the same order."""

    rm_time_limit: Seconds = 10.0
    """Seconds of CPU time for scoring one response (or one group with --group-rm); the wall-clock limit
    is ten times as long. Scoring is tried once more after that, and then counts as failed."""

    rm_workers: Annotated[int, at_least(0), at_most(1024), NO_RESULT] = 0
    """Number of processes that score. 0 takes one per core, at least 4 and at most 32. The number
    changes no reward."""

    rm_max_error_rate: Annotated[float, at_least(0), at_most(1), NO_RESULT] = 0.01
    """Largest fraction of the samples scored together whose scoring may fail or time out. Failed samples
    are counted and not trained on; with more failures the run ends. 0 ends it at the first failure."""

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
