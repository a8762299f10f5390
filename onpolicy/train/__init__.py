"""Training engines: one interface (`base.py`), one file or folder per engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.train import distributed
from onpolicy.train.base import Trainer

if TYPE_CHECKING:
    from onpolicy.train.policy_trainer import PolicyTrainer

__all__ = ["Trainer", "make_trainer"]


def make_trainer(
    config: TrainConfig, contract: NumericsContract, num_threads: int
) -> PolicyTrainer:
    """The engine that `--train-backend` names, as a rank of the group that this process is in, or
    alone. Raises ConfigError if it cannot hold the model."""
    distributed.init_process_group()
    if config.trainer.train_backend == "megatron":
        from onpolicy.train.megatron.make import make_megatron_trainer

        return make_megatron_trainer(config, contract, num_threads)
    from onpolicy.train.fsdp.trainer import FsdpTrainer

    return FsdpTrainer(config, contract, num_threads)
