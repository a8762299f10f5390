"""The flags of the algorithm, from rewards to the loss, with its critic and its recipes.

A recipe is a paper's method as flags of ours. It comes before all other arguments, so that a file
and the command line override it. The critic belongs to `--advantage-estimator gae`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fallback_correction.ranges import ReadBy, above, at_least, at_most
from onpolicy.algorithm.catalogue import (
    ESTIMATORS,
    AdvantageEstimator,
    KlType,
    LossAggregation,
    Objective,
    readers,
    reads,
)
from onpolicy.config.flags import no_flags
from onpolicy.config.kinds import CountOrZero, NonNegative
from onpolicy.config.rules import NO_RESULT, Against, Facts

Recipe = Literal[
    "", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo",
    "reinforce_plus_plus",
]  # fmt: skip

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"loss_aggregation": "seq-mean-token-mean", "use_kl_loss": True, "kl_loss_coef": 0.04},
    "dr_grpo": {"advantage_estimator": "dr_grpo", "loss_aggregation": "seq-mean-token-sum-norm"},
    "dapo": {"eps_clip_high": 0.28, "dynamic_sampling": True},
    "gspo": {"policy_loss": "gspo", "eps_clip": 0.0003, "eps_clip_high": 0.0004},
    "cispo": {"policy_loss": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
    "rloo": {"policy_loss": "reinforce", "advantage_estimator": "rloo", "kl_coef": 0.05},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.01},
}  # fmt: skip


def recipe_of(values: Mapping[str, Any]) -> str:
    """Return a line about the flags that a recipe set, and the overridden ones; "" without one."""
    if not (name := values["recipe"]):
        return ""
    given = RECIPES[name]
    kept = [f"{key} {value}" for key, value in given.items() if values[key] == value]
    others = [f"{key} {values[key]}" for key, value in given.items() if values[key] != value]
    won = f"; given otherwise: {', '.join(others)}" if others else ""
    return f"recipe {name}: {', '.join(kept) or 'nothing'}{won}"


def _read_by(setting: str) -> ReadBy:
    """Return the note on a flag that only some objectives read, by the registry."""
    return ReadBy(
        f"--policy-loss {readers(setting)}",
        lambda run: not run.custom_loss_path and reads(run.policy_loss, setting),
    )


KL_LOSS = ReadBy("--use-kl-loss", lambda run: run.use_kl_loss)
REFERENCE = ReadBy("--use-kl-loss or --kl-coef", lambda run: run.use_kl_loss or run.kl_coef > 0)
UNCORRECTED = Against(
    lambda run: (
        run.use_rollout_logprobs
        and run.policy_loss == "reinforce"
        and not (run.plan.corrections or run.plan.is_always_on_policy)
    ),
    "with --use-rollout-logprobs nothing would correct the rollout, since reinforce has no ratio",
    "Add --use-tis or --use-rs, or leave --use-rollout-logprobs out if that is meant.",
)


def _not_of_one_token(run: Facts) -> str | None:
    """Return the first flag that weighs or rejects a token by more than its own ratio and bounds."""
    by_token = any(rule.startswith("token") for rule in run.rs_rules or [run.rs_level])
    weighs = run.use_tis or run.plan.weighs_lag
    may_reject = run.plan.is_governed and run.governor_highest != "tis"
    found = {
        "--custom-tis-function-path": run.custom_tis_function_path,
        f"--tis-level={run.tis_level}": weighs and run.tis_level != "token",
        "--tis-mode=taper": weighs and run.tis_mode == "taper",
        "--tis-batch-normalize": weighs and run.tis_batch_normalize,
        "--use-rs by tokens": run.use_rs and by_token,
        "--mismatch-governor above --governor-highest=tis, which rejects by tokens,": may_reject
        and by_token,
    }
    return next((flag for flag, is_given in found.items() if is_given), None)


def _centered(when: Callable[[Facts], object], rule: str, remedy: str) -> Against:
    return Against(lambda run: run.policy_loss == "centered" and when(run), rule, remedy)


CENTERED = (
    _centered(
        lambda run: run.plan.is_always_on_policy,
        "with --true-on-policy-mode engine and trainer have one policy, whose scores have the mean 0",
        "Use --policy-loss reinforce, which is the same.",
    ),
    _centered(
        _not_of_one_token,
        "it takes a mean over what each token could have been, and {found} depends on more than that "
        "token's ratio",
        "Leave it out. --use-tis --tis-mode mask rejects tokens, --rs-level sequence sequences.",
    ),
    _centered(
        lambda run: (
            (run.use_tis or run.plan.weighs_lag)
            and run.config.steps_per_rollout > 1
            and not run.use_rollout_logprobs
        ),
        "weights at later optimizer steps of a rollout are of the policy before them, and the mean is "
        "of the current one",
        "Use --use-rollout-logprobs, which weighs by that too, or a --global-batch-size of the whole "
        "rollout.",
    ),
    _centered(
        lambda run: (
            (run.rollout_top_p, run.rollout_top_k, run.rollout_min_p) != (1, -1, 0)
            and (run.plan.is_governed or not run.plan.starts_aligned)
        ),
        "it needs the policy that tokens are drawn from, and with --rollout-top-p, --rollout-top-k or "
        "--rollout-min-p an engine without --true-on-policy-mode returns another",
        "Leave these out, or align the engines.",
    ),
    _centered(
        lambda run: run.opd_loss != "sampled",
        "one loss takes other tokens' log-probabilities, and --opd-loss={run.opd_loss} is one",
        "Use --opd-loss sampled.",
    ),
)
TOO_LONG_A_BUFFER = Against(
    lambda run: run.overlong_buffer_len > run.rollout_max_response_len,
    "must not exceed --rollout-max-response-len {run.rollout_max_response_len}, whose last tokens it is",
    "Give a smaller value.",
)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    recipe: Annotated[Recipe, NO_RESULT] = ""
    """Preset of flags for a method (docs/losses.md). Flags that are given win over the preset."""

    advantage_estimator: Annotated[
        AdvantageEstimator,
        Against(
            lambda run: run.advantage_estimator == "otb" and run.train_backend == "megatron"
            and run.megatron_pp > 1,
            "with --megatron-pp={run.megatron_pp} only the last stage knows whole distributions",
            "Leave --megatron-pp at 1.",
        ),
    ] = "grpo"  # fmt: skip
    """How the rewards of a group become advantages (docs/losses.md)."""

    gamma: Annotated[
        float, at_least(0), at_most(1),
        ReadBy("--advantage-estimator gae, reinforce or reinforce_plus_plus",
            lambda run: ESTIMATORS[run.advantage_estimator].discounts),
    ] = 1.0  # fmt: skip
    """Discount of a reward per sampled token between the token and the reward."""

    policy_loss: Annotated[Objective, UNCORRECTED, *CENTERED] = "ppo"
    """Policy objective: `ppo` clips token ratios, `gspo` clips sequence ratios, `cispo` clips the
    importance weight, `reinforce` has no ratio, `centered` is that with score centering over the
    --opd-top-k likeliest tokens (docs/losses.md)."""

    custom_loss_path: Annotated[
        str,
        Against(lambda run: run.policy_loss != "ppo" and run.policy_loss,
            "it and --policy-loss={found} are two objectives"),
    ] = ""  # fmt: skip
    """Your own objective instead: package.module.function or path/to/file.py:function, which returns the
    loss of each token (docs/losses.md)."""

    eps_clip: Annotated[NonNegative, _read_by("eps_clip")] = 0.2
    """Clip range of the ratio below 1: the lower bound is 1 - eps_clip."""

    eps_clip_high: Annotated[float | None, at_least(0), _read_by("eps_clip_high")] = None
    """Clip range of the ratio above 1: the upper bound is 1 + eps_clip_high. The default is
    --eps-clip."""

    eps_clip_c: Annotated[float | None, above(1), _read_by("eps_clip_c")] = None
    """Dual clip: the loss of a token with a negative advantage A is at most -c A. It must be greater
    than 1. By default there is no such bound."""

    loss_aggregation: LossAggregation | None = None
    """How token losses are averaged: over all tokens of the global batch (token-mean), or over sequences
    of their token means or token sums (-norm divides the sums by --rollout-max-response-len). The
    default depends on --policy-loss (docs/losses.md)."""

    filter_equal_rewards: bool = False
    """Do not train on groups whose rewards are all equal, because they carry no signal. They are not
    replaced."""

    overlong_buffer_len: Annotated[CountOrZero, TOO_LONG_A_BUFFER] = 0
    """DAPO's soft length penalty: the reward of a response shrinks linearly over the last this many
    tokens before --rollout-max-response-len, by 1 at the end. 0 turns it off."""

    kl_coef: NonNegative = 0.0
    """Coefficient of a KL penalty that is subtracted from each token's reward. The KL to the reference
    model is estimated as log pi - log pi_ref (k1). 0 turns it off."""

    use_kl_loss: bool = False
    """Add a KL penalty towards the reference model to the loss."""

    kl_loss_coef: Annotated[NonNegative, KL_LOSS] = 0.001
    """Coefficient of the KL penalty in the loss."""

    kl_loss_type: Annotated[KlType, KL_LOSS] = "low_var_kl"
    """Estimator of the KL penalty in the loss (http://joschu.net/blog/kl-approx.html). low_var_kl is k3
    cut at 10 nats, because the gradient of k3 grows exponentially."""

    entropy_coef: NonNegative = 0.0
    """Coefficient of an entropy bonus: the loss decreases by this times the mean token entropy in nats.
    0 turns it off."""

    ref_checkpoint: Annotated[str, REFERENCE] = ""
    """Checkpoint of the reference model. The default is --hf-checkpoint."""

    @property
    def reads_reference(self) -> bool:
        """Return whether a reference model takes part."""
        return self.use_kl_loss or self.kl_coef > 0


BY_CRITIC = ReadBy("--advantage-estimator gae", lambda run: run.advantage_estimator == "gae")


@no_flags("value_clip")
@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    critic_load: str = ""
    """Checkpoint that the critic begins with: a causal language model, or one with a value head
    (`score.weight`). The default is --hf-checkpoint. A missing value head begins with zeros."""

    critic_lr: Annotated[float | None, at_least(0)] = None
    """Peak learning rate of the critic. The default is --lr. It has no warm-up and decays as
    --lr-decay-style says."""

    num_critic_only_steps: Annotated[
        CountOrZero,
        Against(
            lambda run: 0 < run.num_rollout <= run.num_critic_only_steps,
            "the policy would learn from none of the {run.num_rollout} rollouts",
            "Lower it, or raise --num-rollout.",
        ),
    ] = 0
    """Number of first rollouts on which only the critic is trained."""

    lambd: Annotated[float, at_least(0), at_most(1)] = 1.0
    """Lambda of generalized advantage estimation. 1 uses the observed rewards alone; 0 trusts the critic
    from the next token on."""

    value_clip: NonNegative = 0.2
    """Clip range of the value loss: a value's gradient is cut off beyond this distance from the value
    before the rollout's first optimizer step."""
