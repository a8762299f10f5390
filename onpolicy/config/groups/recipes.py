"""Recipes by name: a paper's method as flags of ours.

A recipe comes before all other arguments, so that a file and the command line override it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Recipe = Literal[
    "", "grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "vespo", "dppo", "rloo", "opo",
    "remax", "reinforce_plus_plus", "lite_ppo", "clip_cov", "kl_cov",
]  # fmt: skip

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"loss_aggregation": "seq-mean-token-mean", "use_kl_loss": True, "kl_loss_coef": 0.04},
    "dr_grpo": {"advantage_estimator": "dr_grpo", "loss_aggregation": "seq-mean-token-sum-norm"},
    "dapo": {"eps_clip_high": 0.28, "dynamic_sampling": True},
    "gspo": {"policy_loss": "gspo", "eps_clip": 0.0003, "eps_clip_high": 0.0004},
    "gmpo": {"policy_loss": "gmpo", "eps_clip": 0.4},
    "cispo": {"policy_loss": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
    "sapo": {"policy_loss": "sapo"},
    "vespo": {"policy_loss": "vespo"},
    "dppo": {"policy_loss": "dppo_tv"},
    "rloo": {"policy_loss": "reinforce", "advantage_estimator": "rloo", "kl_coef": 0.05},
    "opo": {"policy_loss": "reinforce", "advantage_estimator": "opo"},
    "remax": {"advantage_estimator": "remax", "kl_coef": 0.001},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.01},
    "lite_ppo": {"advantage_estimator": "grpo_batch"},
    "clip_cov": {
        "eps_clip": 1.0, "eps_clip_high": 1.0, "clip_cov_ratio": 0.0002, "dynamic_sampling": True,
    },
    "kl_cov": {
        "eps_clip": 1.0, "eps_clip_high": 1e9, "kl_cov_ratio": 0.002, "dynamic_sampling": True,
    },
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
