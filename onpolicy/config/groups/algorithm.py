"""From rewards to the loss."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import ReadBy, above, at_least
from onpolicy.config.kinds import NonNegative
from onpolicy.config.rules import Against

LossAggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


CLIPPED = ReadBy("--policy-loss ppo, gspo or cispo", lambda run: run.policy_loss != "reinforce")
DUAL_CLIP = ReadBy("--policy-loss ppo or gspo", lambda run: run.policy_loss in ("ppo", "gspo"))
KL_LOSS = ReadBy("--use-kl-loss", lambda run: run.use_kl_loss)
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


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    advantage_estimator: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "gae",
    ] = "grpo"
    """How the rewards of a prompt's samples become advantages; gae: by a critic's values."""

    policy_loss: Annotated[Literal["ppo", "gspo", "cispo", "reinforce"], UNCORRECTED] = "ppo"
    """Objective: the clipped ratio of tokens or of sequences, clipped weights, or no ratio."""

    eps_clip: Annotated[NonNegative, CLIPPED] = 0.2
    """Lower clip of the PPO ratio: 1 - eps_clip."""

    eps_clip_high: Annotated[float | None, at_least(0), CLIPPED] = None
    """Upper clip of the PPO ratio: 1 + eps_clip_high; the same as --eps-clip if not given."""

    eps_clip_c: Annotated[float | None, above(1), DUAL_CLIP] = None
    """Dual clip: with a negative advantage the loss is at most -c times it. Greater than 1."""

    use_opsm: bool = False
    """Drop tokens of negative advantage in sequences that drifted from the rollout's policy."""

    opsm_delta: Annotated[NonNegative, ReadBy("--use-opsm", lambda run: run.use_opsm)] = 1e-4
    """Largest mean log-ratio, rollout over current, of a sequence that is kept."""

    loss_aggregation: LossAggregation | None = None
    """Mean over all tokens of the global batch, or over its sequences of their token means or sums
    (-norm: over --rollout-max-response-len). Default: token-mean, but seq-mean-token-mean for gspo."""

    filter_equal_rewards: bool = False
    """Leave out groups whose rewards are all equal: they carry no signal."""

    use_kl_loss: bool = False
    """Add a KL penalty towards the reference model to the loss."""

    kl_loss_coef: Annotated[NonNegative, KL_LOSS] = 0.001
    """Weight of that penalty."""

    kl_loss_type: Annotated[Literal["k1", "k2", "k3", "low_var_kl"], KL_LOSS, BIASED] = "low_var_kl"
    """Estimator of that penalty (http://joschu.net/blog/kl-approx.html); low_var_kl is k3 cut at 10
    nats, since the gradient of k3 grows exponentially."""

    use_unbiased_kl: Annotated[bool, KL_LOSS] = False
    """Multiply that estimate by the ratio to the rollout's policy, which makes its gradient unbiased."""

    ref_checkpoint: Annotated[str, KL_LOSS] = ""
    """Checkpoint of the reference model; --hf-checkpoint if not given."""
