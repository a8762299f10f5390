"""The flags of sampling."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import ReadBy, Rule, above, at_least, at_most
from onpolicy.algorithm.registry import ESTIMATORS
from onpolicy.config.kinds import SMALLEST_TEMPERATURE, Count, CountOrZero, Unasked
from onpolicy.config.rules import NO_RESULT, Against, Facts, Together

MAX_SAMPLES = 10_000_000
"""Most samples of a rollout: one process holds all of them."""

NO_LIMIT_IS_MINUS_ONE = Rule(
    lambda x: x != 0, "must be -1 (no limit) or at least 1. Leave it out for -1."
)
NOT_GREEDY = Rule(
    lambda x: not x < SMALLEST_TEMPERATURE,
    f"must be at least {SMALLEST_TEMPERATURE:g}: SGLang samples greedily below it, and a greedy rollout "
    "has no log-probabilities to learn from. Give 1.0, or another value in that range.",
)


def _one_token(asks: Callable[[Facts], bool], remedy: str) -> Against:
    return Against(
        lambda run: asks(run) and run.plan.may_align,
        "with --true-on-policy-mode log-probabilities are those of what a token is drawn from, and of "
        "one token that is 0, of which nothing can be learnt",
        f"Give {remedy}, or run without --true-on-policy-mode.",
    )


ONE_TOKEN = _one_token(lambda run: bool(run.rollout_top_k == 1), "2 or more")
ONLY_LIKELIEST = _one_token(lambda run: bool(run.rollout_min_p == 1), "less than 1")


def _is_free(run: Facts) -> bool:
    return bool(run.rollout_schedule == "free")


BY_CLOCK = ReadBy("--rollout-schedule free", _is_free)
NOT_BY_CLOCK = Against(
    _is_free,
    "with --rollout-schedule free the clock decides which weights a token comes from",
)
CORRECTED_ANYWAY = Against(
    lambda run: run.plan.may_lag and run.plan.on_aligned_mismatch == "fall back",
    "samples of earlier weights are corrected in any case, whether engines mismatch or not",
    "Leave --parity-policy out: a mismatch that the probe of each push finds ends the run.",
)
GROUPS_OF_TWO = Against(
    lambda run: run.n_samples_per_prompt < 2 and ESTIMATORS[run.advantage_estimator].compares,
    "--advantage-estimator {run.advantage_estimator} compares the samples of a group and needs 2 or "
    "more",
    "Raise it, or use --advantage-estimator reinforce or gae.",
)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    rollout_max_response_len: Count = Unasked(1024)
    """Longest response, in tokens; if not given, at most half of the model's context."""

    rollout_top_p: Annotated[float, above(0), at_most(1)] = 1.0
    """Sample from the likeliest tokens that together have this probability, of what --rollout-top-k
    left. With --true-on-policy-mode both sides take log-probabilities, entropy and KL of what a token
    was drawn from (docs/filters.md); else of the whole vocabulary."""

    rollout_top_k: Annotated[int, at_least(-1), NO_LIMIT_IS_MINUS_ONE, ONE_TOKEN] = -1
    """Sample from the k likeliest tokens."""

    rollout_min_p: Annotated[float, at_least(0), at_most(1), ONLY_LIKELIEST] = 0.0
    """Drop tokens less likely than this share of the likeliest."""

    rollout_stop_token_ids: Annotated[tuple[int, ...], at_least(0)] = ()
    """Tokens that end a response, besides the checkpoint's end-of-sequence tokens."""

    rollout_stop_at_turn_ends: bool = True
    """Have the tokenizer's end-of-sequence token end a response too and, in chats, the token with which
    the chat template ends an answer, where config.json and generation_config.json do not list it."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(SamplingConfig):
    num_rollout: Count = 100
    """Number of rollouts, each followed by training on it."""

    rollout_batch_size: Annotated[
        Count,
        Together(lambda run: run.config.samples_per_rollout > MAX_SAMPLES,
            "--rollout-batch-size={run.rollout_batch_size}: x n_samples_per_prompt "
            "{run.n_samples_per_prompt} = {run.config.samples_per_rollout} samples, and a rollout, "
            f"which one process holds, may have {MAX_SAMPLES}. Lower one of the two."),
    ] = 32  # fmt: skip
    """Prompts per rollout."""

    n_samples_per_prompt: Annotated[Count, GROUPS_OF_TWO] = 8
    """Responses sampled for every prompt, or episodes begun; they form one group."""

    rollout_temperature: Annotated[float, NOT_GREEDY] = 1.0
    """Divides the logits before sampling, and before log-probabilities are taken on both sides."""

    rollout_lag: Annotated[
        CountOrZero, NOT_BY_CLOCK,
        Against(lambda run: run.rollout_lag >= run.num_rollout and str(run.num_rollout - 1),
            "with --num-rollout={run.num_rollout} all samples would be those of the first weights",
            "Give at most {found}."),
        Against(lambda run: run.colocate,
            "with --colocate the servers give their memory back while the trainer computes, and with a "
            "lag they sample then"),
        CORRECTED_ANYWAY,
    ] = 0  # fmt: skip
    """Rollouts by which the weights that sample are behind those that learn: with K the engines sample
    for step k + K while step k trains. 0: each waits for the other (docs/async.md)."""

    rollout_segment_tokens: Annotated[
        CountOrZero, NOT_BY_CLOCK,
        Against(lambda run: run.rollout_segment_tokens > run.rollout_max_response_len,
            "no response is longer than --rollout-max-response-len={run.rollout_max_response_len}",
            "Give less, or leave it out for whole responses."),
        CORRECTED_ANYWAY,
    ] = 0  # fmt: skip
    """Draw responses in rounds of at most so many tokens each; those that are not complete when a step
    has its groups go on under the next weights. 0: whole responses, a step's all under one version."""

    rollout_schedule: Annotated[Literal["rule", "free"], CORRECTED_ANYWAY] = "rule"
    """What decides which samples a step gets, and from which weights each token comes. rule: the flags
    above. free: the clock; the engines always draw, pushes interrupt them, and groups that are complete
    first are trained on first. What the clock has decided is written down for --replay."""

    max_staleness: Annotated[Count, BY_CLOCK] = 2
    """With --rollout-schedule free: pushes between the weights of a group's oldest token and those that
    learn from it, at most. No group begins for which that could not be, and a step waits for those that
    would be older in the next."""

    replay: Annotated[
        str, BY_CLOCK,
        Against(lambda run: _is_free(run) and not run.plan.starts_aligned,
            "without --true-on-policy-mode a token depends on the batch that it was sampled in, which "
            "no journal repeats", "Replay a run of that mode."),
        NO_RESULT,
    ] = ""  # fmt: skip
    """Repeat a run of --rollout-schedule free to the bit: its rollouts.jsonl. Everything else is given
    as it was to that run."""

    dynamic_sampling: Annotated[
        bool, Against(_is_free,
            "draws groups in the place of others by rule, and with --rollout-schedule free the clock "
            "decides what is drawn",
            "Leave one of the two out; --filter-equal-rewards may stay."),
        Against(lambda run: run.n_samples_per_prompt < 2 and not run.config.compares_with_greedy,
            "the rewards of a group of --n-samples-per-prompt={run.n_samples_per_prompt} are always "
            "equal", "Raise that to 2 or more."),
        Against(lambda run: run.filter_equal_rewards,
            "draws others for the groups that --filter-equal-rewards leaves out"),
    ] = False  # fmt: skip
    """Draw groups in the place of those whose rewards are all equal, until a rollout has all its groups
    (DAPO, arXiv 2503.14476)."""

    dynamic_sampling_limit: Annotated[
        Count, ReadBy("--dynamic-sampling", lambda run: run.dynamic_sampling)
    ] = 10
    """Groups with equal rewards, in multiples of --rollout-batch-size, after which a rollout is given up
    and the run ends."""

    over_sampling_batch_size: Annotated[
        int | None, at_least(1),
        ReadBy("--dynamic-sampling, --rollout-segment-tokens or --rollout-schedule free",
            lambda run: run.dynamic_sampling or run.rollout_segment_tokens or _is_free(run)),
    ] = None  # fmt: skip
    """Prompts whose responses are drawn at a time; --rollout-batch-size if not given."""
