"""A result of `onpolicy explain`, made up: two layers, one response, a name with HTML in it."""

import math


def site(module, operator, *, rows=100, inputs=0, outputs=0, own=0):
    return {
        "site": (module, operator, 0), "rows": rows, "inputs_differ": inputs,
        "outputs_differ": outputs, "own": own,
    }  # fmt: skip


RESULT = {
    "num_mismatched_tokens": 2,
    "num_compared_tokens": 3,
    "k3_kl_mean": 1e-6,
    "max_abs_diff": 0.5,
    "first_token": {
        "sequence": 0, "response_position": 1, "rollout_log_prob": -1.0, "train_log_prob": -1.5,
    },
    "source": {
        "name": "linear of layers.1.self_attn.<q>", "cause": "operator", "sequence": 0, "position": 4,
        "site": ("layers.1.self_attn.<q>", "linear", 0), "before": ("embed_tokens", "embedding", 0),
        "ranks": (0,), "train_ranks": (0,), "rollout_shape": (3, 8), "train_shape": (1, 40, 8),
    },
    "rollout_ranks": 1,
    "train_ranks": 1,
    "only_in_one": [],
    "proof": None,
    "sites": [
        site("embed_tokens", "embedding"),
        site("layers.0.self_attn.<q>", "linear"),
        site("layers.1.self_attn.<q>", "linear", outputs=7, own=7),
        site("layers.1.self_attn", "attention", inputs=80, outputs=80),
        site("lm_head", "linear", rows=3, inputs=2, outputs=2),
    ],
    "responses": [
        {
            "tokens": [5, 9, 7], "rollout_log_probs": [-1.0, -1.0, math.nan],
            "train_log_probs": [-1.0, -1.5, math.nan],
        },
    ],
}  # fmt: skip
