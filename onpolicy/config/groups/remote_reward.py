"""The flags of scoring over HTTP: a reward service, or a model as a judge."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, get_args

from fallback_correction.ranges import ReadBy, Rule, at_least, at_most
from onpolicy.config import secrets
from onpolicy.config.kinds import Count, CountOrZero, HeaderText, Seconds
from onpolicy.config.rules import NO_RESULT, Facts, Parsed, Together
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

REMOTE, JUDGE = asks("remote_rm"), asks("judge")
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
    rm_url: Annotated[str, URL, REMOTE, NO_URL] = ""
    """Address that samples are sent to with --rm-type remote_rm (docs/rewards.md has the protocol)."""

    rm_api_key: Annotated[
        HeaderText, Parsed(partial(secrets.reveal, "--rm-api-key")), REMOTE, NO_RESULT
    ] = ""  # fmt: skip
    """Its API key, or @ and a file that holds it."""

    rm_batch_size: Annotated[Count, REMOTE, NO_RESULT] = 16
    """Samples in one request to --rm-url."""

    rm_concurrency: Annotated[Count, at_most(1024), ANY, NO_RESULT] = 16
    """Requests that are under way at a time."""

    rm_retries: Annotated[CountOrZero, at_most(20), ANY, NO_RESULT] = 3
    """Times that a request is repeated, after growing pauses, if it had no answer within
    --rm-request-timeout, or HTTP 429 or 5xx."""

    rm_request_timeout: Annotated[Seconds, ANY, NO_RESULT] = 60.0
    """Seconds for one request."""

    rm_breaker: Annotated[Count, ANY, NO_RESULT] = 8
    """Requests that fail in a row, with all their retries, after which no more are sent for this rollout
    or evaluation. The next begins with one alone."""

    judge_url: Annotated[str, URL, JUDGE] = ""
    """Base address of the OpenAI-compatible server of --rm-type judge, as http://host:8000/v1."""

    judge_model: Annotated[str, JUDGE] = ""
    """Name of the judge, as its server knows it."""

    judge_api_key: Annotated[
        HeaderText, Parsed(partial(secrets.reveal, "--judge-api-key")), JUDGE, NO_RESULT
    ] = ""  # fmt: skip
    """API key of that server, or @ and a file that holds it."""

    judge_prompt: Annotated[str, JUDGE, INCOMPLETE_JUDGE] = ""
    """File with what the judge is asked; {prompt} (the messages as words), {question} (the last of the
    user), {response} and {label} stand for the sample's."""

    judge_verdict: Annotated[str, Parsed(_require_verdict), JUDGE] = SCORE
    """Regular expression with one group: its last match in the judge's answer is the reward. The default
    finds the number of `Score: 7`."""

    judge_max_tokens: Annotated[Count, JUDGE] = 2048
    """Longest answer of the judge, with its thinking. One that is cut off there has failed."""

    judge_temperature: Annotated[float, at_least(0), at_most(2), JUDGE] = 0.0
    """Temperature of the judge; above 0 its verdicts are not repeatable."""
