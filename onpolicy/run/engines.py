"""The two engines of a run, and the weights between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor
from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.config.groups import FallbackConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import CheckpointError
from onpolicy.rollout.base import EnginesRestartedError, Progress, RolloutGroup, SamplingJob
from onpolicy.run.launch.engine_specs import make_rollout_group, replays_routing
from onpolicy.run.launch.host_shares import share_of_cores
from onpolicy.train import Trainer, make_trainer
from onpolicy.train.base import Rescored
from onpolicy.trajectory import UNPUSHED, Completion
from onpolicy.types import Request
from onpolicy.weights.push import Engine

logger = logging.getLogger(__name__)

MakeRollout = Callable[[TrainConfig, PretrainedConfig, NumericsContract, Path, int], RolloutGroup]
MakeTrainer = Callable[[TrainConfig, NumericsContract, Path], Trainer]
LogProbs = Callable[
    [Sequence[list[int]], Sequence[int], float, Sequence[list[bytes]]], list[Tensor]
]
"""`Trainer.log_probs`."""


def trainer_here(config: TrainConfig, contract: NumericsContract, logs: Path) -> Trainer:
    """A trainer in this process, on all cores."""
    return make_trainer(config, contract, config.engine.cpu_threads or share_of_cores(1))


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
        make_trainer: MakeTrainer = trainer_here,
    ):
        self.config, self.hf_config, self.contract = config, hf_config, contract
        self._make_rollout, self._make_trainer = make_rollout, make_trainer
        self.on_progress: Progress = lambda done, tokens: None
        self._logs, self._longest_sequence = directory / "logs", longest_sequence
        self.rollout, self._on_stop = self._new_rollout(), ExitStack()
        self.weight_version = UNPUSHED
        self.weight_digest = self.expected_digest = ""

    def _new_rollout(self) -> RolloutGroup:
        return self._make_rollout(
            self.config, self.hf_config, self.contract, self._logs, self._longest_sequence
        )

    def start(self) -> None:
        """Start the servers, load the trainer meanwhile, and check that both keep the contract."""
        self._launch()
        logger.info("loading the model into the trainer")
        self.trainer = self._make_trainer(self.config, self.contract, self._logs)
        self._on_stop.callback(self.trainer.close)
        self.rollout.connect(self.trainer.self_check)

    def _launch(self) -> None:
        """Start the servers; those that share GPUs measure them while nobody else has memory there, and
        leave them to the trainer until the first push."""
        self.rollout.launch()
        self.make_room()

    def use(self, contract: NumericsContract, fallback: FallbackConfig) -> None:
        """Change contract and correction between rollouts; new servers need a push afterwards."""
        changes = contract != self.contract
        self.contract = contract
        if changes:
            self.rollout.stop()
            self.rollout = self._new_rollout()
            if self.config.engine.colocate:
                self.trainer.release_memory("weights")
            self._launch()
        self.trainer.adapt(contract, fallback)
        if changes:
            self.rollout.connect(self.trainer.self_check)

    @property
    def replays_routing(self) -> bool:
        """Whether the trainer takes the experts that the rollout took."""
        return replays_routing(self.config, self.contract)

    @property
    def tells_entropy(self) -> bool:
        """Whether the trainer takes the entropies that the rollout tells: those of its own functions."""
        return self.config.algorithm.compares_entropies and self.contract.is_aligned

    def push_weights(self, version: int) -> None:
        """Give the servers the trainer's weights, and have them prove that they hold them.

        Servers that die on the way are started again, and all get the weights once more.
        """
        self.weight_version = version
        self._push_by(self.trainer.push)
        expected, self.expected_digest = self.expected_digest, ""
        if expected not in ("", self.weight_digest):
            raise CheckpointError(
                f"--load={self.config.output.load}: the trainer has other weights (digest "
                f"{self.weight_digest}) than were pushed when it was saved ({expected}). With "
                f"--lora-rank the base is read from --hf-checkpoint={self.config.model.hf_checkpoint}, "
                "whose files must be those of then. Put them back, or start a new run."
            )

    def push_again(self) -> None:
        """Give servers that were started again the weights of the last push, in the same way."""
        self._push_by(self.trainer.push_again)

    def _push_by(self, way: Callable[[Sequence[Engine], int], str]) -> None:
        what = f"pushing the weights of version {self.weight_version}"
        self._through_deaths(lambda: self._push(way), what)

    def _push(self, way: Callable[[Sequence[Engine], int], str]) -> None:
        colocate = self.config.engine.colocate
        if colocate:
            self.trainer.release_memory("state")
            self.rollout.release_memory()  # of those that were started again since
        try:
            self.rollout.resume_memory("weights")
            self.weight_digest = way(self.rollout.clients, self.weight_version)
        finally:
            if colocate:  # also for a server that died, which measures what is free when it starts
                self.trainer.release_memory("weights")
        self.rollout.resume_memory("kv_cache")

    @contextmanager
    def room(self) -> Iterator[None]:
        """Let the trainer write what it holds beside servers that share its GPUs; they get it again."""
        self.make_room()
        yield
        if self.config.engine.colocate:
            self.push_again()

    def make_room(self) -> None:
        """Let servers that share GPUs with the trainer give back memory until the next push."""
        if self.config.engine.colocate:
            self._through_deaths(self.rollout.release_memory, "taking memory back from the servers")

    def _through_deaths(self, call: Callable[[], None], what: str) -> None:
        """Call it until no server dies on the way; those that did are started again."""
        while True:
            try:
                call()
                return
            except Exception:
                if not self.rollout.revive():  # else it failed because an engine died
                    raise
            logger.warning("%s again", what)

    def generate(
        self, requests: Sequence[Request], push_again: Callable[[], None] | None = None
    ) -> list[Completion]:
        """Sample responses, as `work` does."""
        return self.work(SamplingJob(requests), push_again)

    def work(
        self, job: SamplingJob, push_again: Callable[[], None] | None = None
    ) -> list[Completion]:
        """Have a job done; servers that die on the way get the current weights again.

        `push_again`: has that done, where the caller's thread is not the one that calls the trainer.
        """
        while True:
            self.rollout.on_progress = self.on_progress
            try:
                return self.rollout.generate(job)
            except EnginesRestartedError:
                (push_again or self.push_again)()

    def score(
        self,
        requests: Sequence[Request],
        completions: Sequence[Completion],
        temperature: float,
        log_probs: LogProbs | None = None,
    ) -> list[Tensor]:
        """The trainer's log-probabilities of what was answered: float32 [R] of each response.

        Packed in the opposite order, so that no row has the neighbours that it was sampled beside.
        `log_probs`: in place of the trainer's.
        """
        self.make_room()
        asked = _asked(requests, completions, temperature)
        return (log_probs or self.trainer.log_probs)(*asked)[::-1]

    def rescore(
        self, requests: Sequence[Request], completions: Sequence[Completion], temperature: float
    ) -> list[Rescored]:
        """Return what the trainer says of each response, packed as in `score`; under an aligned contract
        it draws every token again."""
        self.make_room()
        seeds = [request.sampling_seed for request in requests] if self.contract.is_aligned else []
        asked = _asked(requests, completions, temperature)
        return self.trainer.rescore(*asked, seeds[::-1])[::-1]

    def stop(self) -> None:
        """End the servers, and the ranks of the trainer."""
        self.rollout.stop()
        self._on_stop.close()


def _asked(
    requests: Sequence[Request], completions: Sequence[Completion], temperature: float
) -> tuple[list[list[int]], list[int], float, list[list[bytes]]]:
    """Return what `Trainer.log_probs` takes, in the opposite order."""
    answers = list(zip(requests, completions, strict=True))[::-1]
    return (
        [request.prompt_ids + completion.response_ids for request, completion in answers],
        [len(request.prompt_ids) for request, _ in answers],
        temperature,
        [completion.kept_tokens for _, completion in answers],
    )
