"""The trainer: its interface (`base.py`), and the engines that hold its models (`engine.py`)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.training import distributed
from onpolicy.training.base import Trainer

if TYPE_CHECKING:
    from onpolicy.training.advantages import Estimator
    from onpolicy.training.engine import TrainingEngine
    from onpolicy.training.policy_trainer import PolicyTrainer

__all__ = ["Trainer", "make_trainer"]


def make_trainer(
    config: TrainConfig,
    contract: NumericsContract,
    num_threads: int,
    estimator: Estimator | None = None,
) -> PolicyTrainer:
    """Make a trainer on the engine that `--train-backend` names, as a rank of this process's group or
    alone.

    estimator: the advantage estimator; by default the one that --advantage-estimator names. Raises
    ConfigError if the engine cannot hold the model.
    """
    from onpolicy.training.policy_trainer import PolicyTrainer

    distributed.init_process_group()
    engine = _training_engine(config, contract)
    return PolicyTrainer(config, contract, num_threads, engine, estimator)


def _training_engine(config: TrainConfig, contract: NumericsContract) -> TrainingEngine:
    if config.trainer.train_backend == "megatron":
        from onpolicy.training.megatron.make import megatron_engine

        return megatron_engine(config, contract)
    from onpolicy.training.fsdp.fsdp_model import FsdpModel
    from onpolicy.training.fsdp.replicas import Replicas

    replicas = Replicas.of(config.cluster.fsdp_shard_ranks, contract.device)
    return partial(FsdpModel, config, contract, replicas=replicas)
