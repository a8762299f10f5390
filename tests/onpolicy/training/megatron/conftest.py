"""Checkpoints of architectures, made once."""

import pytest

from tests.support.tiny import make_checkpoint

CHANGES = {
    # Layers with and without experts.
    "qwen3-moe": {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts_per_tok": 3},
    "qwen2-moe": {"num_hidden_layers": 4, "mlp_only_layers": [1]},
    "glm4-moe": {
        "num_hidden_layers": 4, "n_routed_experts": 12, "use_qk_norm": True, "attention_bias": True,
        "routed_scaling_factor": 2.5,
    },
    "mixtral": {"num_local_experts": 6},
}  # fmt: skip
"""To the tiny models: numbers that 2 and 3 ranks divide."""


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """Makes the checkpoint of an architecture, once."""
    made = {}

    def checkpoint_of(architecture):
        if architecture not in made:
            changes = CHANGES.get(architecture, {})
            directory = tmp_path_factory.mktemp(architecture)
            made[architecture] = make_checkpoint(directory, architecture, **changes)
        return made[architecture]

    return checkpoint_of
