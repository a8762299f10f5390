"""The two engines of a run, and the weights between them.

Every rank of the trainer holds one. The rollout lives on rank 0, whose results (and errors) are
shared with the others; training and gathering weights take all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.config.groups import FallbackConfig
from onpolicy.contract import NumericsContract
from onpolicy.rollout.base import EnginesRestartedError, Progress, RolloutGroup, SamplingJob
from onpolicy.run.engine_specs import make_rollout_group, replays_routing
from onpolicy.run.placement import share_of_cores
from onpolicy.train import Trainer, distributed, make_trainer
from onpolicy.types import Completion, Request

logger = logging.getLogger(__name__)

MakeRollout = Callable[[TrainConfig, PretrainedConfig, NumericsContract, Path, int], RolloutGroup]
MakeTrainer = Callable[[TrainConfig, NumericsContract, int], Trainer]


class EnginePair:
    """A trainer and a rollout group that keep one contract."""

    trainer: Trainer

    def __init__(
        self,
        config: TrainConfig,
        hf_config: PretrainedConfig,
        contract: NumericsContract,
        directory: Path,
        *,
        longest_sequence: int = 0,
        make_rollout: MakeRollout = make_rollout_group,
        make_trainer: MakeTrainer = make_trainer,
    ):
        self.config, self.hf_config, self.contract = config, hf_config, contract
        self._make_rollout, self._make_trainer = make_rollout, make_trainer
        self.on_progress: Progress = lambda done, tokens: None
        self._logs, self._longest_sequence = directory / "logs", longest_sequence
        self.rollout = self._new_rollout()
        self.weight_version = ""
        self.weight_digest = ""

    def _new_rollout(self) -> RolloutGroup | None:
        if distributed.rank() != 0:
            return None
        return self._make_rollout(
            self.config, self.hf_config, self.contract, self._logs, self._longest_sequence
        )

    def start(self) -> None:
        """Start the servers, load the trainer meanwhile, and check that both keep the contract."""
        distributed.run_on_rank_zero(self._launch)
        logger.info("loading the model into the trainer")
        threads = self.config.engine.cpu_threads or share_of_cores(distributed.local_world_size())
        self.trainer = self._make_trainer(self.config, self.contract, threads)
        self._connect()

    def _launch(self) -> None:
        assert self.rollout is not None
        self.rollout.launch()

    def _connect(self) -> None:
        def connect() -> None:
            assert self.rollout is not None
            self.rollout.connect(self.trainer.self_check)

        distributed.run_on_rank_zero(connect)

    def use(self, contract: NumericsContract, fallback: FallbackConfig) -> None:
        """Change contract and correction between rollouts; new servers need a push afterwards."""
        changes = contract != self.contract
        self.contract = contract
        if changes and self.rollout is not None:
            self.rollout.stop()
            self.rollout = self._new_rollout()
            assert self.rollout is not None
            self.rollout.launch()
        self.trainer.adapt(contract, fallback)
        if changes:
            self._connect()

    @property
    def replays_routing(self) -> bool:
        """Whether the trainer takes the experts that the rollout took."""
        return replays_routing(self.config, self.contract)

    def push_weights(self, version: str) -> None:
        """Give the servers the trainer's weights, and have them prove that they hold them.

        Servers that die on the way are started again, and all get the weights once more.
        """
        self.weight_version = version
        while True:
            try:
                self.weight_digest = self._push()
                return
            except EnginesRestartedError:
                logger.warning("pushing the weights of version %s again", version)

    def _push(self) -> str:
        """One attempt; collective. The digest of the weights, on every rank."""
        if self.rollout is None:
            self.trainer.push([], self.weight_version)
        return distributed.run_on_rank_zero(self._push_from_rank_zero)

    def _push_from_rank_zero(self) -> str:
        assert self.rollout is not None
        try:
            return self.trainer.push(self.rollout.clients, self.weight_version)
        except Exception as error:
            if self.rollout.revive():  # whatever failed, failed because an engine died
                raise EnginesRestartedError from error
            raise

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample responses; servers that die on the way get the current weights again."""

        job = SamplingJob(requests)

        def generate() -> list[Completion]:
            assert self.rollout is not None
            self.rollout.on_progress = self.on_progress
            return self.rollout.generate(job)

        while True:
            try:
                return distributed.run_on_rank_zero(generate)
            except EnginesRestartedError:
                self.push_weights(self.weight_version)

    def stop(self) -> None:
        """End the servers."""
        if self.rollout is not None:
            self.rollout.stop()
