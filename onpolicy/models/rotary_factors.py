"""A fixed choice of rotary angles that transformers would choose by the longest sequence of a batch.

LongRoPE (Phi-3, Phi-4-mini) has two lists of factors, for short and for long sequences; dynamic
scaling changes its base beyond the model's context. A token's bits would depend on the other
sequences of its batch, and cached keys on when they were computed. So the choice is made once, by
the context length that the engine serves, and is part of the contract. vLLM chooses LongRoPE's
factors by the same rule.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE, DYNAMIC = "longrope", "dynamic"

CHOSEN = "chosen_longrope"
"""An own rope_type: LongRoPE's angles, which transformers does not choose again at run time."""

ROPE_INIT_FUNCTIONS[CHOSEN] = ROPE_INIT_FUNCTIONS[LONGROPE]


def follows_context(config: PretrainedConfig) -> bool:
    """Return whether the angles of this configuration's model depend on the served context length."""
    return any(one.get("rope_type") in (LONGROPE, DYNAMIC) for one in rotations(config))


def choose_factors(config: PretrainedConfig, context: int) -> list[str]:
    """Fix the angles of `config` for sequences of up to `context` tokens; return the choices, in words.

    LongRoPE's long factors are used where `context` exceeds the original training context, else the
    short ones. Dynamic scaling changes nothing up to max_position_embeddings tokens, and an aligned
    engine serves no more (`context_limit`).
    """
    chosen = []
    for one in rotations(config):
        if one.get("rope_type") == LONGROPE:
            original = one["original_max_position_embeddings"]
            name = "long_factor" if context > original else "short_factor"
            one |= {"rope_type": CHOSEN, "long_factor": one[name], "short_factor": one[name]}
            if "short_mscale" in one:  # Phi-3.5-MoE's
                mscale = one[name.replace("factor", "mscale")]
                one |= {"long_mscale": mscale, "short_mscale": mscale}
            chosen.append(f"{name} (original_max_position_embeddings={original})")
        elif one.get("rope_type") == DYNAMIC:
            one |= {"rope_type": "default", "rope_theta": _unscaled_base(config, one)}
            chosen.append(f"rope_theta={one['rope_theta']}, not scaled")
    return chosen


def forget_scaling(config: PretrainedConfig) -> None:
    """Give `config` the default rotary type: the same shapes, and no look at positions at run time."""
    for one in rotations(config):
        if one.get("rope_type") in (LONGROPE, DYNAMIC, CHOSEN):
            one["rope_type"] = "default"


def _unscaled_base(config: PretrainedConfig, one: dict[str, Any]) -> float:
    """Return the base of dynamic scaling within max_position_embeddings tokens; HunYuan's has an alpha.

    Source: HunYuanMoEV1RotaryEmbedding,
    transformers/models/hunyuan_v1_moe/modeling_hunyuan_v1_moe.py.
    """
    base: float = one["rope_theta"]
    if config.model_type.startswith("hunyuan") and one.get("alpha"):
        base *= one["alpha"] ** (config.head_dim / (config.head_dim - 2))
    return base


def context_limit(config: PretrainedConfig) -> float:
    """Return the number of tokens up to which the chosen angles hold for every batch."""
    is_dynamic = any(one.get("rope_type") == DYNAMIC for one in rotations(config))
    return float(config.max_position_embeddings if is_dynamic else "inf")


def rotations(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return `rope_parameters`, and its entries if there is one for each kind of layer."""
    rope: Any = getattr(config, "rope_parameters", None) or {}
    return [one for one in (rope, *rope.values()) if isinstance(one, dict)]
