"""Runs of few tokens, and what an engine is asked for in them: for sums of memory."""

from __future__ import annotations

from onpolicy.config import TrainConfig, groups
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import rollout_spec


def make_config(path, dtype="float32", checkpointing=False, **engine):
    return TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=str(path), dtype=dtype),
        rollout=groups.RolloutConfig(num_rollout=1, rollout_batch_size=2, n_samples_per_prompt=2),
        engine=groups.EngineConfig(cpu_threads=1, **engine),
        trainer=groups.TrainerConfig(
            max_tokens_per_gpu=200, activation_checkpointing=checkpointing
        ),
        parity=groups.ParityConfig(true_on_policy_mode=True),
    )


def make_spec(config, longest=50):
    hf_config = load_config(config.model.hf_checkpoint)
    contract = contract_for(config, hf_config, aligned=True)
    return hf_config, rollout_spec(config, hf_config, contract, longest)
