"""Training engines: one interface (`base.py`), one file or folder per engine."""

from __future__ import annotations

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.train.base import Trainer

__all__ = ["Trainer", "make_trainer"]


def make_trainer(config: TrainConfig, contract: NumericsContract, num_threads: int) -> Trainer:
    """The engine that `--train-backend` names."""
    from onpolicy.train.fsdp import FsdpTrainer

    return FsdpTrainer(config, contract, num_threads)
