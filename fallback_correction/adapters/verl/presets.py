"""verl's named rollout corrections (verl/trainer/config/algorithm.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fallback_correction.choices import require_choices

Level = Literal["token", "sequence"]
LossType = Literal["ppo_clip", "reinforce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionConfig:
    """verl's keys and defaults. For strings of thresholds see `thresholds`."""

    rollout_is: Level | None = "sequence"
    rollout_is_threshold: str | float | None = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: str | float | None = None

    bypass_mode: bool = False
    """Whether pi_rollout is the old policy. The trainer reads this and `loss_type`: the adapter
    computes weights and masks from the log-probabilities that it is given."""

    loss_type: LossType = "ppo_clip"
    """Loss in bypass mode: ppo_clip, which takes the mask and no weights, or reinforce, which takes
    both."""

    def __post_init__(self) -> None:
        require_choices(self)


def _presets() -> dict[str, RolloutCorrectionConfig]:
    token = RolloutCorrectionConfig(rollout_is="token")
    sequence = RolloutCorrectionConfig(rollout_is="sequence")
    none = RolloutCorrectionConfig(rollout_is=None)
    icepop = replace(token, rollout_is_threshold="0.5_5.0")

    def geo(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        return replace(config, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001")

    def k3(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        return replace(config, rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01)

    def clip(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        return replace(config, bypass_mode=True, loss_type="ppo_clip")

    def pg(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        return replace(config, bypass_mode=True, loss_type="reinforce")

    return {
        "decoupled_token_is": token,
        "decoupled_seq_is": sequence,
        "decoupled_token_icepop": icepop,
        "decoupled_seq_is_rs": replace(
            sequence, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"
        ),
        "decoupled_geo_rs": geo(none),
        "decoupled_geo_rs_seq_tis": geo(sequence),
        "decoupled_geo_rs_token_tis": geo(token),
        "decoupled_k3_rs": k3(none),
        "decoupled_k3_rs_seq_tis": k3(sequence),
        "decoupled_k3_rs_token_tis": k3(token),
        "bypass_ppo_clip": clip(none),
        "bypass_ppo_clip_geo_rs": clip(geo(none)),
        "bypass_ppo_clip_k3_rs": clip(k3(none)),
        "bypass_pg_is": pg(sequence),
        "bypass_pg_token_icepop": pg(icepop),
        "bypass_pg_geo_rs": pg(geo(none)),
        "bypass_pg_geo_rs_seq_tis": pg(geo(sequence)),
        "bypass_pg_geo_rs_token_tis": pg(geo(token)),
        "disabled": none,
    }


PRESETS = _presets()
"""Presets by the names of verl's factory methods. For other thresholds use dataclasses.replace."""
