"""A registry of all objectives and estimators: their parts, formulas, papers, and peers.

The choices of flags, the settings that each choice reads, the code that computes, and the table in
docs/losses.md come from here. An objective is a ratio and a bound. This module imports no torch.

r: the log-ratio log pi - log pi_old of a token, rho = exp(r); A: its advantage; e: --eps-clip, E:
--eps-clip-high; sg: without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fallback_correction.choices import require_choice, require_choices

Objective = Literal[
    "ppo", "gspo", "gspo_token", "gmpo", "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl", "ipo",
    "ratio_mask", "reinforce",
]  # fmt: skip
Ratio = Literal["none", "token", "sequence", "sequence-token", "product"]
Level = Literal["token", "sequence", "sequence-token"]
Bound = Literal[
    "none", "clip", "weight", "gate", "gamma", "clip-then-mean", "tv", "tv-both", "binary-kl", "band"
]  # fmt: skip
AdvantageEstimator = Literal[
    "grpo", "grpo_batch", "dr_grpo", "rloo", "opo", "grpo_passk", "gdpo", "reinforce",
    "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae",
]  # fmt: skip
Baseline = Literal["none", "mean", "others", "by-length", "second-best", "greedy"]
Scale = Literal["none", "group", "batch", "tokens"]
KlType = Literal["k1", "k2", "k3", "low_var_kl"]
LossAggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True, kw_only=True)
class Named:
    """The documentation of an entry."""

    formula: str
    source: str
    peers: str

    def __post_init__(self) -> None:
        require_choices(self)


@dataclass(frozen=True, kw_only=True)
class ObjectiveEntry(Named):
    ratio: Ratio
    bound: Bound
    aggregation: LossAggregation = "token-mean"
    """Default of --loss-aggregation."""


@dataclass(frozen=True, kw_only=True)
class EstimatorEntry(Named):
    baseline: Baseline
    scale: Scale = "none"
    whitens: bool = False
    """Whether the advantages are whitened over the tokens of the rollout."""

    compares: bool = True
    """Whether the samples of a group are compared with each other, so that it needs at least 2."""

    returns: bool = False
    """Whether a token gets the sum of rewards from it on, where tokens have rewards."""

    @property
    def discounts(self) -> bool:
        """Return whether later rewards may be discounted; estimators with a baseline do not discount."""
        return self.returns and self.baseline == "none"


BY_SEQUENCE: LossAggregation = "seq-mean-token-mean"

OBJECTIVES: dict[Objective, ObjectiveEntry] = {
    "ppo": ObjectiveEntry(
        ratio="token", bound="clip",
        formula="max(-rho A, -clip(rho, 1 - e, 1 + E) A)", source="arXiv 1707.06347, eq. 7",
        peers="verl vanilla; TRL grpo, bnpo, dr_grpo, dapo; slime, Miles, NeMo-RL, AReaL ppo",
    ),
    "gspo": ObjectiveEntry(
        ratio="sequence", bound="clip", aggregation=BY_SEQUENCE,
        formula="ppo of s = exp(mean of r over the sequence)", source="arXiv 2507.18071, eq. 5 and 7",
        peers="slime, Miles gspo; TRL, AReaL importance_sampling_level sequence",
    ),
    "gspo_token": ObjectiveEntry(
        ratio="sequence-token", bound="clip", aggregation=BY_SEQUENCE,
        formula="ppo of sg(s) pi / sg(pi)", source="arXiv 2507.18071, eq. 13 and 14",
        peers="verl gspo",
    ),
    "gmpo": ObjectiveEntry(
        ratio="token", bound="clip-then-mean", aggregation=BY_SEQUENCE,
        formula="-A exp(mean of the smaller of r and clip(r, -e, E), by the sign of A)",
        source="arXiv 2507.20673", peers="verl geo_mean",
    ),
    "cispo": ObjectiveEntry(
        ratio="token", bound="weight",
        formula="-sg(clip(rho, 1 - e, 1 + E)) A log pi", source="arXiv 2506.13585, eq. 4",
        peers="verl, TRL, slime cispo; NeMo-RL use_cispo",
    ),
    "sapo": ObjectiveEntry(
        ratio="token", bound="gate", aggregation=BY_SEQUENCE,
        formula="-4 / tau sigmoid(tau (rho - 1)) A, tau by the sign of A", source="arXiv 2511.20347",
        peers="verl, TRL sapo; AReaL use_sapo_loss",
    ),
    "vespo": ObjectiveEntry(
        ratio="product", bound="gamma",
        formula="-sg(w^k exp(l - l w)) A log pi, w = exp(sum of r), k and l by the sign of A",
        source="arXiv 2602.10693", peers="TRL vespo",
    ),
    "dppo_tv": ObjectiveEntry(
        ratio="token", bound="tv",
        formula="-rho A; no gradient where pi - pi_old > E (A > 0) or < -e (else)",
        source="arXiv 2602.04879", peers="verl dppo_tv; prime-rl default",
    ),
    "dppo_kl": ObjectiveEntry(
        ratio="token", bound="binary-kl",
        formula="-rho A; no gradient where the binary KL is > E, e and pi moved on as A says",
        source="arXiv 2602.04879", peers="verl dppo_kl",
    ),
    "ipo": ObjectiveEntry(
        ratio="token", bound="tv-both",
        formula="-rho A; no gradient where pi - pi_old > E or < -e", source="prime-rl's code",
        peers="prime-rl ipo",
    ),
    "ratio_mask": ObjectiveEntry(
        ratio="token", bound="band",
        formula="-rho A; no gradient where rho is outside [1 - e, 1 + E]",
        source="IcePop, arXiv 2510.18855", peers="prime-rl mask_ratio_low, mask_ratio_high",
    ),
    "reinforce": ObjectiveEntry(
        ratio="none", bound="none",
        formula="-A log pi", source="Williams 1992", peers="verl gpg; bypass reinforce",
    ),
}  # fmt: skip

READ_BY_BOUND: dict[Bound, tuple[str, ...]] = {
    "none": (),
    "clip": ("eps_clip", "eps_clip_high", "eps_clip_c", "importance_sampling_level"),
    "weight": ("eps_clip", "eps_clip_high", "importance_sampling_level"),
    "gate": ("sapo_tau_pos", "sapo_tau_neg", "importance_sampling_level"),
    "gamma": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    "clip-then-mean": ("eps_clip", "eps_clip_high"),
    "tv": ("eps_clip", "eps_clip_high", "eps_clip_c"),
    "tv-both": ("eps_clip", "eps_clip_high", "eps_clip_c"),
    "binary-kl": ("eps_clip", "eps_clip_high", "eps_clip_c"),
    "band": ("eps_clip", "eps_clip_high", "eps_clip_c"),
}
"""Settings that each bound reads."""

ESTIMATORS: dict[AdvantageEstimator, EstimatorEntry] = {
    "grpo": EstimatorEntry(
        baseline="mean", scale="group",
        formula="(r - mean) / (std + 1e-6)", source="arXiv 2402.03300",
        peers="grpo everywhere (TRL adds 1e-4)",
    ),
    "grpo_batch": EstimatorEntry(
        baseline="mean", scale="batch",
        formula="(r - mean of the group) / (std of the rollout + 1e-6)", source="arXiv 2508.08221",
        peers="TRL scale_rewards batch (with 1e-4)",
    ),
    "dr_grpo": EstimatorEntry(
        baseline="mean", formula="r - mean", source="arXiv 2503.20783",
        peers="verl norm_adv_by_std_in_grpo false; TRL scale_rewards none; slime "
        "--disable-grpo-std-normalization",
    ),
    "rloo": EstimatorEntry(
        baseline="others", formula="r - mean of the others", source="arXiv 2402.14740",
        peers="verl, TRL rloo",
    ),
    "opo": EstimatorEntry(
        baseline="by-length", formula="r - sum of n r / sum of n, n: sampled tokens",
        source="arXiv 2505.23585", peers="verl opo",
    ),
    "grpo_passk": EstimatorEntry(
        baseline="second-best", scale="group",
        formula="of the best: (r - that of the second) / (std + 1e-6); others: 0",
        source="arXiv 2503.19595", peers="verl grpo_passk",
    ),
    "gdpo": EstimatorEntry(
        baseline="mean", scale="group",
        formula="grpo of each named reward, weighed and added up, then (a - mean) / (std + 1e-6) over "
        "the rollout", source="arXiv 2601.05242",
        peers="TRL multi_objective_aggregation normalize_then_sum (with 1e-4); verl gdpo (over tokens)",
    ),
    "reinforce": EstimatorEntry(
        baseline="none", compares=False, returns=True,
        formula="r, or the rewards from a token on", source="Williams 1992", peers="",
    ),
    "remax": EstimatorEntry(
        baseline="greedy", compares=False, returns=True,
        formula="r, or the rewards from a token on, less r of the group's greedy answer",
        source="arXiv 2310.10505", peers="verl remax",
    ),
    "reinforce_plus_plus": EstimatorEntry(
        baseline="none", compares=False, returns=True, whitens=True,
        formula="reinforce, whitened over tokens", source="arXiv 2501.03262",
        peers="verl, slime, Miles reinforce_plus_plus",
    ),
    "reinforce_plus_plus_baseline": EstimatorEntry(
        baseline="mean", whitens=True,
        formula="r - mean, whitened over tokens", source="arXiv 2501.03262",
        peers="verl, slime, Miles reinforce_plus_plus_baseline",
    ),
    "gae": EstimatorEntry(
        baseline="none", compares=False, returns=True, whitens=True,
        formula="sum of (gamma lambda)^k delta, by a critic (ppo.md), whitened over tokens",
        source="arXiv 1506.02438", peers="verl, OpenRLHF gae; slime ppo",
    ),
}  # fmt: skip


def reads(objective: Objective, setting: str) -> bool:
    """Return whether an objective reads a setting."""
    require_choice("objective", objective, Objective)
    return setting in READ_BY_BOUND[OBJECTIVES[objective].bound]


def readers(setting: str) -> str:
    """Return the objectives that read a setting, for messages. Example: 'ppo, gspo or cispo'"""
    *most, last = [name for name in OBJECTIVES if reads(name, setting)]
    return f"{', '.join(most)} or {last}" if most else last
