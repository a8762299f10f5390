"""Catalogue of all objectives and estimators: their parts, formulas, papers, and peers.

The choices of flags, the settings that each choice reads, the code that computes, and the table in
docs/losses.md come from here. An objective is a ratio and a bound. This module imports no torch.

r: the log-ratio log pi - log pi_old of a token, rho = exp(r); A: its advantage; e: --eps-clip, E:
--eps-clip-high; sg: without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fallback_correction.ranges import require_choice, require_choices

Objective = Literal["ppo", "gspo", "cispo", "reinforce", "centered"]
Ratio = Literal["none", "token", "sequence"]
Bound = Literal["none", "clip", "weight"]
AdvantageEstimator = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
    "otb", "gae",
]  # fmt: skip
Baseline = Literal["none", "mean", "others", "token"]
Scale = Literal["none", "group"]
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
    "cispo": ObjectiveEntry(
        ratio="token", bound="weight",
        formula="-sg(clip(rho, 1 - e, 1 + E)) A log pi", source="arXiv 2506.13585, eq. 4",
        peers="verl, TRL, slime cispo; NeMo-RL use_cispo",
    ),
    "reinforce": ObjectiveEntry(
        ratio="none", bound="none",
        formula="-A log pi", source="Williams 1992", peers="verl gpg; bypass reinforce",
    ),
    "centered": ObjectiveEntry(
        ratio="none", bound="none",
        formula="-A (log pi - E_mu[log pi]), each weighted, mu: the engine's policy",
        source="arXiv 2609.20807, eq. 14",
        peers="NeMo-RL score_centering; vime --use-score-centering",
    ),
}  # fmt: skip

READ_BY_BOUND: dict[Bound, tuple[str, ...]] = {
    "none": (),
    "clip": ("eps_clip", "eps_clip_high", "eps_clip_c"),
    "weight": ("eps_clip", "eps_clip_high"),
}
"""Settings that each bound reads."""

ESTIMATORS: dict[AdvantageEstimator, EstimatorEntry] = {
    "grpo": EstimatorEntry(
        baseline="mean", scale="group",
        formula="(r - mean) / (std + 1e-6)", source="arXiv 2402.03300",
        peers="grpo everywhere (TRL adds 1e-4)",
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
    "reinforce": EstimatorEntry(
        baseline="none", compares=False, returns=True,
        formula="r, or the rewards from a token on", source="Williams 1992", peers="",
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
    "otb": EstimatorEntry(
        baseline="token", returns=True,
        formula="rewards from a token on, less their norm-weighted mean there",
        source="arXiv 2602.07078", peers="verl tir_optimal_token_baseline",
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
