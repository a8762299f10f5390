"""The flags of sampling."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import ReadBy, Rule, above, at_least, at_most
from onpolicy.algorithm.catalogue import ESTIMATORS
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
    """Longest response, in tokens. The default is lowered to half of the model's context where that is
    shorter."""

    rollout_top_p: Annotated[float, above(0), at_most(1)] = 1.0
    """Nucleus sampling: sample from the most likely tokens whose probabilities sum to this value, after
    --rollout-top-k. With --true-on-policy-mode log-probabilities, entropy and KL are computed over the
    tokens that remain (docs/filters.md), otherwise over the whole vocabulary. 1 turns it off."""

    rollout_top_k: Annotated[int, at_least(-1), NO_LIMIT_IS_MINUS_ONE, ONE_TOKEN] = -1
    """Sample from the k most likely tokens. -1 turns it off."""

    rollout_min_p: Annotated[float, at_least(0), at_most(1), ONLY_LIKELIEST] = 0.0
    """Drop tokens whose probability is less than this fraction of the most likely token's. 0 turns it
    off."""

    rollout_stop_token_ids: Annotated[tuple[int, ...], at_least(0)] = ()
    """Token ids that end a response, in addition to the end-of-sequence tokens of the checkpoint and the
    tokenizer and, in chats, the token with which the chat template ends an answer."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(SamplingConfig):
    num_rollout: Count = 100
    """Number of training steps. Each samples a rollout and trains on it."""

    rollout_batch_size: Annotated[
        Count,
        Together(lambda run: run.config.samples_per_rollout > MAX_SAMPLES,
            "--rollout-batch-size={run.rollout_batch_size}: x n_samples_per_prompt "
            "{run.n_samples_per_prompt} = {run.config.samples_per_rollout} samples, and a rollout, "
            f"which one process holds, may have {MAX_SAMPLES}. Lower one of the two."),
    ] = 32  # fmt: skip
    """Number of prompts in a rollout."""

    n_samples_per_prompt: Annotated[Count, GROUPS_OF_TWO] = 8
    """Number of responses (or episodes) sampled for each prompt. They form a group."""

    rollout_temperature: Annotated[float, NOT_GREEDY] = 1.0
    """Sampling temperature. Both engines divide the logits by it before they compute
    log-probabilities."""

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
    """Asynchronous training: how many steps the weights that sample are behind the weights that learn.
    With K, the engines sample for step k + K while step k trains. 0 is synchronous (docs/async.md)."""

    rollout_schedule: Annotated[Literal["rule", "free"], CORRECTED_ANYWAY] = "rule"
    """`rule`: --rollout-lag decides which samples a step trains on, and from which weights.
    `free`: the clock decides. The engines never stop sampling, weight pushes interrupt them, and the
    groups that finish first are trained on first. The decisions are recorded for --replay."""

    max_staleness: Annotated[Count, BY_CLOCK] = 2
    """Largest staleness with --rollout-schedule free: the number of pushes between the weights that
    sampled a group's oldest token and the weights that learn from it. Groups that would become staler
    are not begun, and a step waits for groups that would be too stale in the next one."""

    replay: Annotated[
        str, BY_CLOCK,
        Against(lambda run: _is_free(run) and not run.plan.starts_aligned,
            "without --true-on-policy-mode a token depends on the batch that it was sampled in, which "
            "no journal repeats", "Replay a run of that mode."),
        NO_RESULT,
    ] = ""  # fmt: skip
    """Repeat a run of --rollout-schedule free bit for bit from its rollouts.jsonl. All other flags must
    be the same as in that run."""

    dynamic_sampling: Annotated[
        bool, Against(_is_free,
            "draws groups in the place of others by rule, and with --rollout-schedule free the clock "
            "decides what is drawn",
            "Leave one of the two out; --filter-equal-rewards may stay."),
        Against(lambda run: run.n_samples_per_prompt < 2,
            "the rewards of a group of --n-samples-per-prompt={run.n_samples_per_prompt} are always "
            "equal", "Raise that to 2 or more."),
        Against(lambda run: run.filter_equal_rewards,
            "draws others for the groups that --filter-equal-rewards leaves out"),
    ] = False  # fmt: skip
    """Replace groups whose rewards are all equal by new groups, until a rollout has --rollout-batch-size
    groups (DAPO, arXiv 2503.14476). The run ends with an error if a step would replace more than 10
    times --rollout-batch-size groups."""

    over_sampling_batch_size: Annotated[
        int | None, at_least(1),
        ReadBy("--dynamic-sampling or --rollout-schedule free",
            lambda run: run.dynamic_sampling or _is_free(run)),
    ] = None  # fmt: skip
    """Number of groups that are sampled at a time. The default is --rollout-batch-size."""
