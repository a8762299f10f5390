"""A run that can save and load: a trainer, and engines whose server is not started."""

from __future__ import annotations

from pathlib import Path

from onpolicy.config import TrainConfig, groups
from onpolicy.engines import EnginePair
from onpolicy.models.checkpoint import load_config
from onpolicy.saving import RunState
from onpolicy.start import make_contract
from onpolicy.train import distributed, make_trainer


def make_run(checkpoint: Path, directory: Path) -> tuple[TrainConfig, EnginePair]:
    """It saves under `directory`."""
    distributed.init_process_group()
    save = f"{directory}/save"
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=str(checkpoint), dtype="float32"),
        rollout=groups.RolloutConfig(num_rollout=9),
        output=groups.OutputConfig(save=save, save_interval=2, load=save),
        parity=groups.ParityConfig(true_on_policy_mode=True),
    )
    hf_config = load_config(str(checkpoint))
    contract = make_contract(str(checkpoint), hf_config, dtype="float32", aligned=True)
    engines = EnginePair(config, hf_config, contract, directory)
    engines.trainer = make_trainer(config, contract, 1)
    return config, engines


def state_after(rollouts_done: int) -> RunState:
    return RunState(rollouts_done=rollouts_done, run_hash="hash", governor={})
