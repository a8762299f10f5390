"""The flags of the algorithm, from rewards to the loss."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import NotAbove, ReadBy, above, at_least, at_most
from onpolicy.algorithm.registry import (
    ESTIMATORS,
    OBJECTIVES,
    AdvantageEstimator,
    KlType,
    Level,
    LossAggregation,
    Objective,
    readers,
    reads,
)
from onpolicy.config.groups.greedy import MISFIT
from onpolicy.config.groups.recipes import Recipe
from onpolicy.config.kinds import CountOrZero, NonNegative, Positive
from onpolicy.config.rules import NO_RESULT, Against, Together


def _read_by(setting: str) -> ReadBy:
    """Return the note on a flag that only some objectives read, by the registry."""
    return ReadBy(f"--policy-loss {readers(setting)}", lambda run: reads(run.policy_loss, setting))


KL_LOSS = ReadBy("--use-kl-loss", lambda run: run.use_kl_loss)
KL_REWARD = ReadBy("--kl-coef", lambda run: run.kl_coef > 0)
REFERENCE = ReadBy("--use-kl-loss or --kl-coef", lambda run: run.use_kl_loss or run.kl_coef > 0)
ADAPTIVE = ReadBy("--kl-ctrl adaptive", lambda run: run.kl_ctrl == "adaptive")
TO_ENTROPY = ReadBy("--entropy-ctrl adaptive", lambda run: run.entropy_ctrl == "adaptive")
CLIP_COV = ReadBy("--clip-cov-ratio", lambda run: run.clip_cov_ratio > 0)
KL_COV = ReadBy("--kl-cov-ratio", lambda run: run.kl_cov_ratio > 0)
TOO_LARGE_A_BONUS = Together(
    lambda run: run.entropy_ctrl == "adaptive" and run.entropy_coef > run.entropy_coef_max,
    "--entropy-coef={run.entropy_coef:g}: must not exceed --entropy-coef-max {run.entropy_coef_max:g}. "
    "Change one of them.",
)
OVERLONG = ReadBy("--overlong-buffer-len", lambda run: run.overlong_buffer_len)
GDPO = ReadBy("--advantage-estimator gdpo", lambda run: run.advantage_estimator == "gdpo")
UNCORRECTED = Against(
    lambda run: (
        run.use_rollout_logprobs
        and run.policy_loss == "reinforce"
        and not (run.plan.corrections or run.plan.is_always_on_policy)
    ),
    "with --use-rollout-logprobs nothing would correct the rollout, since reinforce has no ratio",
    "Add --use-tis or --use-rs, or leave --use-rollout-logprobs out if that is meant.",
)
BIASED = Against(
    lambda run: run.use_unbiased_kl and run.kl_loss_type == "k2",
    "the mean of k2 is not the KL, so --use-unbiased-kl would not make it unbiased",
    "Use k1, k3 or low_var_kl, or leave --use-unbiased-kl out.",
)
WHOLE_SEQUENCES = Against(
    lambda run: run.policy_loss == "vespo" and run.use_tis,
    "its weight is that of the whole sequence already, and --use-tis would count the engines' part of "
    "it in another way than its paper",
    "Give --use-rollout-logprobs instead of --use-tis: then the weight is pi / pi_rollout.",
)
NO_RATIO = Against(
    lambda run: OBJECTIVES[run.policy_loss].ratio == "none",
    "--policy-loss {run.policy_loss} has no ratio",
)
SEVERAL_STEPS = Against(
    lambda run: run.config.steps_per_rollout > 1,
    "a rollout has {run.config.steps_per_rollout} optimizer steps, and a later one has another ratio",
    "Let --global-batch-size be a whole rollout, or leave it out.",
)
NO_LOG_RATIO = Against(
    lambda run: (
        run.config.steps_per_rollout == 1
        and not run.plan.bypasses_lag
        and (run.plan.is_always_on_policy or not run.use_rollout_logprobs)
    ),
    "in the only optimizer step of a rollout pi_old is pi itself, so that it would do nothing",
    "Let --global-batch-size be a part of a rollout, or give --use-rollout-logprobs without "
    "--true-on-policy-mode: then pi_old is the rollout's.",
)
BYPASSED = Against(
    lambda run: run.use_rollout_logprobs,
    "with --use-rollout-logprobs the ratio is what corrects the rollout",
)
OF_NAMED_REWARDS = Against(
    lambda run: run.advantage_estimator == "gdpo",
    "--advantage-estimator gdpo learns from the named parts of a reward, and what is taken off their "
    "sum would do nothing",
)
NO_PARTS = Together(
    lambda run: run.advantage_estimator == "gdpo" and not (run.gdpo_reward_keys or run.rewards),
    "--gdpo-reward-keys=(): --advantage-estimator gdpo normalises named rewards one by one. "
    "Give two or more as --rewards NAME=WEIGHT, or the names of what the reward function returns.",
)
WEIGHTS_OF_PARTS = Against(
    lambda run: len(run.gdpo_reward_weights) != len(run.gdpo_reward_keys),
    "there must be one for each of --gdpo-reward-keys",
    "Give as many, in their order.",
)
TOO_LONG_A_BUFFER = Against(
    lambda run: run.overlong_buffer_len > run.rollout_max_response_len,
    "must not exceed --rollout-max-response-len {run.rollout_max_response_len}, whose last tokens it is",
    "Give a smaller value.",
)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    recipe: Annotated[Recipe, NO_RESULT] = ""
    """Flags of a method by its name, which other flags win over (docs/losses.md)."""

    advantage_estimator: Annotated[AdvantageEstimator, NO_PARTS, MISFIT] = "grpo"
    """How the rewards of a prompt's samples become advantages (docs/losses.md)."""

    gamma: Annotated[
        float, at_least(0), at_most(1),
        ReadBy("--advantage-estimator gae, reinforce or reinforce_plus_plus",
            lambda run: ESTIMATORS[run.advantage_estimator].discounts),
    ] = 1.0  # fmt: skip
    """Discount of a reward with every sampled token that comes before it."""

    gdpo_reward_keys: Annotated[tuple[str, ...], GDPO] = ()
    """gdpo: the named numbers of a reward that are normalised one by one; those of --rewards, with their
    weights, if not given."""

    gdpo_reward_weights: Annotated[tuple[float, ...], GDPO, WEIGHTS_OF_PARTS] = ()
    """gdpo: the weight of each; 1 if not given."""

    policy_loss: Annotated[Objective, UNCORRECTED, WHOLE_SEQUENCES] = "ppo"
    """Objective: a ratio and what bounds it (docs/losses.md)."""

    importance_sampling_level: Annotated[Level | None, _read_by("importance_sampling_level")] = None
    """Ratio of tokens, of sequences (their geometric mean), or that with a token's own gradient, in
    place of the objective's own."""

    force_on_policy_ratio: Annotated[bool, NO_RATIO, SEVERAL_STEPS, BYPASSED] = False
    """Take the current policy for the old one: a ratio of exactly 1, with its gradient."""

    eps_clip: Annotated[NonNegative, _read_by("eps_clip")] = 0.2
    """Lower clip of the ratio: 1 - eps_clip. dppo, ipo: how far a probability may fall."""

    eps_clip_high: Annotated[float | None, at_least(0), _read_by("eps_clip_high")] = None
    """Upper clip of the ratio: 1 + eps_clip_high; the same as --eps-clip if not given."""

    eps_clip_c: Annotated[float | None, above(1), _read_by("eps_clip_c")] = None
    """Dual clip: with a negative advantage the loss is at most -c times it. Greater than 1. Where tokens
    are masked: the largest ratio."""

    sapo_tau_pos: Annotated[Positive, _read_by("sapo_tau_pos")] = 1.0
    """How sharp the gate of tokens of positive advantage is."""

    sapo_tau_neg: Annotated[Positive, _read_by("sapo_tau_neg")] = 1.05
    """How sharp that of the others is."""

    vespo_k_pos: Annotated[NonNegative, _read_by("vespo_k_pos")] = 2.0
    """Power of a sequence's weight, where its advantage is not negative."""

    vespo_lambda_pos: Annotated[NonNegative, _read_by("vespo_lambda_pos")] = 3.0
    """Rate at which a weight above 1 counts for less there."""

    vespo_k_neg: Annotated[NonNegative, _read_by("vespo_k_neg")] = 3.0
    """Power of a sequence's weight, where its advantage is negative."""

    vespo_lambda_neg: Annotated[NonNegative, _read_by("vespo_lambda_neg")] = 2.0
    """Rate at which a weight above 1 counts for less there."""

    use_opsm: bool = False
    """Drop tokens of negative advantage in sequences that drifted from the rollout's policy."""

    opsm_delta: Annotated[NonNegative, ReadBy("--use-opsm", lambda run: run.use_opsm)] = 1e-4
    """Largest mean log-ratio, rollout over current, of a sequence that is kept."""

    top_entropy_quantile: Annotated[float, above(0), at_most(1)] = 1.0
    """Learn the objective from this share of the tokens alone, those of the largest entropy."""

    clip_cov_ratio: Annotated[float, at_least(0), at_most(1)] = 0.0
    """Clip-Cov: learn nothing from so many tokens, as a share of all, by chance among those whose
    covariance of log-probability and advantage lies between the two bounds; 0: it is off."""

    clip_cov_lb: Annotated[float, NotAbove("clip_cov_ub"), CLIP_COV] = 1.0
    """The lower bound."""

    clip_cov_ub: Annotated[float, CLIP_COV] = 5.0
    """The upper bound."""

    kl_cov_ratio: Annotated[float, at_least(0), at_most(1), NO_LOG_RATIO] = 0.0
    """KL-Cov: hold so many tokens, as a share of all, to the old policy, those of the largest such
    covariance; 0: it is off."""

    kl_cov_coef: Annotated[NonNegative, KL_COV] = 1.0
    """Add this times |log pi - log pi_old| to their loss."""

    loss_aggregation: LossAggregation | None = None
    """Mean over all tokens of the global batch, or over its sequences of their token means or sums
    (-norm: over --rollout-max-response-len). Default: the objective's own (docs/losses.md)."""

    filter_equal_rewards: bool = False
    """Leave out groups whose rewards are all equal: they carry no signal."""

    overlong_buffer_len: Annotated[CountOrZero, TOO_LONG_A_BUFFER, OF_NAMED_REWARDS] = 0
    """Last tokens of --rollout-max-response-len over which a reward shrinks, for answers that end there;
    0: none do."""

    overlong_penalty_factor: Annotated[NonNegative, OVERLONG] = 1.0
    """What an answer of the longest length pays."""

    kl_coef: Annotated[NonNegative, OF_NAMED_REWARDS] = 0.0
    """Take this times the KL towards the reference model off each token's reward."""

    kl_penalty: Annotated[KlType, KL_REWARD] = "k1"
    """Estimator of that KL (http://joschu.net/blog/kl-approx.html)."""

    kl_ctrl: Annotated[Literal["fixed", "adaptive"], KL_REWARD] = "fixed"
    """Keep --kl-coef, or let it move after every rollout to where the KL comes to --kl-target."""

    kl_target: Annotated[Positive, ADAPTIVE] = 0.1
    """adaptive: the mean KL of a token that is aimed at, in nats."""

    kl_horizon: Annotated[Positive, ADAPTIVE] = 10000.0
    """adaptive: samples in which an error of a fifth or more would move the coefficient by a fifth."""

    use_kl_loss: bool = False
    """Add a KL penalty towards the reference model to the loss."""

    kl_loss_coef: Annotated[NonNegative, KL_LOSS] = 0.001
    """Weight of that penalty."""

    kl_loss_type: Annotated[KlType, KL_LOSS, BIASED] = "low_var_kl"
    """Estimator of that penalty (http://joschu.net/blog/kl-approx.html); low_var_kl is k3 cut at 10
    nats, since the gradient of k3 grows exponentially."""

    use_unbiased_kl: Annotated[bool, KL_LOSS] = False
    """Multiply that estimate by the ratio to the rollout's policy, which makes its gradient unbiased."""

    entropy_coef: Annotated[NonNegative, TOO_LARGE_A_BONUS] = 0.0
    """Take this times the mean entropy of a token, in nats, off the loss."""

    entropy_ctrl: Literal["fixed", "adaptive"] = "fixed"
    """Keep --entropy-coef, or let it move after every rollout, and stand in the loss only while the
    entropy is at most --entropy-target."""

    entropy_target: Annotated[Positive, TO_ENTROPY] = 0.2
    """adaptive: the mean entropy of a token that is aimed at, in nats."""

    entropy_coef_delta: Annotated[Positive, TO_ENTROPY] = 0.005
    """adaptive: what the coefficient rises or falls by."""

    entropy_coef_max: Annotated[Positive, TO_ENTROPY] = 1.0
    """adaptive: what it rises to at most."""

    log_ratio_coef: Annotated[NonNegative, NO_LOG_RATIO] = 0.0
    """Add this times the mean of (log pi - log pi_old)^2 to the loss."""

    positive_nll_coef: NonNegative = 0.0
    """Add this times the mean -log pi of the samples of high reward to the loss (VAPO)."""

    positive_nll_above: Annotated[
        float, ReadBy("--positive-nll-coef", lambda run: run.positive_nll_coef > 0)
    ] = 0.0
    """The reward that such a sample exceeds."""

    ref_checkpoint: Annotated[str, REFERENCE] = ""
    """Checkpoint of the reference model; --hf-checkpoint if not given."""

    @property
    def reads_reference(self) -> bool:
        """Return whether a reference model takes part."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def compares_covariances(self) -> bool:
        """Return whether tokens are selected by log-probabilities before the first optimizer step."""
        return self.clip_cov_ratio > 0 or self.kl_cov_ratio > 0

    @property
    def compares_entropies(self) -> bool:
        """Return whether tokens are selected by entropies before the first optimizer step."""
        return self.top_entropy_quantile < 1
