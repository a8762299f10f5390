"""The two engines of a run, and the weight pushes between them."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from torch import Tensor
from transformers import PretrainedConfig

from onpolicy.cluster.placement import share_of_cores
from onpolicy.config import TrainConfig
from onpolicy.config.groups import FallbackConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import CheckpointError
from onpolicy.rollout.base import EnginesRestartedError, Progress, RolloutGroup, SamplingJob
from onpolicy.run.launch.engine_specs import make_rollout_group
from onpolicy.training import Trainer, make_trainer
from onpolicy.training.base import Rescored
from onpolicy.trajectory import UNPUSHED, Completion
from onpolicy.types import Request

logger = logging.getLogger(__name__)

MakeRollout = Callable[[TrainConfig, PretrainedConfig, NumericsContract, Path, int], RolloutGroup]
MakeTrainer = Callable[[TrainConfig, NumericsContract, Path], Trainer]
LogProbs = Callable[
    [Sequence[list[int]], Sequence[int], float, Sequence[list[bytes]]], list[Tensor]
]
"""The signature of `Trainer.log_probs`."""


def trainer_here(config: TrainConfig, contract: NumericsContract, logs: Path) -> Trainer:
    """Return a trainer in this process, on all cores."""
    return make_trainer(config, contract, config.engine.cpu_threads or share_of_cores(1))


class EnginePair:
    """A trainer and a rollout group under one contract."""

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
        """Start the servers; colocated ones measure the GPUs while they are empty, and then release
        their memory to the trainer until the first push."""
        self.rollout.launch()
        self.make_room()

    def use(self, contract: NumericsContract, fallback: FallbackConfig, centers: bool) -> None:
        """Change contract and corrections between rollouts; new servers need a push afterwards."""
        changes = contract != self.contract
        self.contract = contract
        if changes:
            self.rollout.stop()
            self.rollout = self._new_rollout()
            # Free the shared GPUs before new servers measure them.
            if self.config.engine.colocate:
                self.trainer.release_memory("weights")
            self._launch()
        self.trainer.adapt(contract, fallback, centers)
        if changes:
            self.rollout.connect(self.trainer.self_check)

    def push_weights(self, version: int) -> None:
        """Push the trainer's weights to the servers, and check the digests that they return.
        Servers that die meanwhile are restarted, and all servers get the weights once more. Raises
        CheckpointError if a resumed trainer has other weights than at the save."""
        self.weight_version = version
        for attempt in self._until_none_dies(f"pushing the weights of version {version}"):
            with attempt, self._memory_for_weights():
                self.weight_digest = self.trainer.push(self.rollout.clients, version)
        expected, self.expected_digest = self.expected_digest, ""
        if expected not in ("", self.weight_digest):
            raise CheckpointError(
                f"--load={self.config.output.load}: the trainer has other weights (digest "
                f"{self.weight_digest}) than were pushed when it was saved ({expected}). With "
                f"--lora-rank the base is read from --hf-checkpoint={self.config.model.hf_checkpoint}, "
                "whose files must be those of then. Put them back, or start a new run."
            )

    def push_again(self) -> None:
        """Push the weights of the last push again, to servers that were restarted."""
        version = self.weight_version
        for attempt in self._until_none_dies(f"pushing the weights of version {version}"):
            with attempt, self._memory_for_weights():
                self.weight_digest = self.trainer.push_again(self.rollout.clients, version)

    @contextmanager
    def _memory_for_weights(self) -> Iterator[None]:
        """Give colocated servers memory for weights, and afterwards for their caches."""
        colocate = self.config.engine.colocate
        if colocate:
            self.trainer.release_memory("state")
            self.rollout.release_memory()  # memory of servers that were restarted meanwhile
        try:
            self.rollout.resume_memory("weights")
            yield
        finally:
            # Also if a server died, since its successor measures free memory at its start.
            if colocate:
                self.trainer.release_memory("weights")
        self.rollout.resume_memory("kv_cache")

    @contextmanager
    def room(self) -> Iterator[None]:
        """Release colocated servers' memory while the trainer writes its state; push again after."""
        self.make_room()
        yield
        if self.config.engine.colocate:
            self.push_again()

    def make_room(self) -> None:
        """Release the memory of colocated servers until the next push."""
        if self.config.engine.colocate:
            for attempt in self._until_none_dies("taking memory back from the servers"):
                with attempt:
                    self.rollout.release_memory()

    def _until_none_dies(self, what: str) -> Iterator[AbstractContextManager[None]]:
        """Yield contexts to call the servers in until none dies in one; restart those that did."""
        is_done = False

        @contextmanager
        def attempt() -> Iterator[None]:
            nonlocal is_done
            try:
                yield
                is_done = True
            except Exception:
                if not self.rollout.revive():  # no server has died
                    raise
                logger.warning("%s again", what)

        while not is_done:
            yield attempt()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample responses, as `work` does."""
        return self.work(SamplingJob(requests))

    def work(
        self, job: SamplingJob, push_again: Callable[[], None] | None = None
    ) -> list[Completion]:
        """Run a job; servers that die meanwhile are restarted and get the current weights again.
        `push_again`: does that push, if the caller's thread may not call the trainer."""
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
        """Return the trainer's log-probabilities of the completions: float32 [R] for each response.
        The sequences are packed in reverse order, so that no row has the neighbours that it was
        sampled beside. `log_probs`: a function to use instead of the trainer's."""
        self.make_room()
        asked = _asked(requests, completions, temperature)
        return (log_probs or self.trainer.log_probs)(*asked)[::-1]

    def rescore(
        self, requests: Sequence[Request], completions: Sequence[Completion], temperature: float
    ) -> list[Rescored]:
        """Return the trainer's log-probabilities and tokens for each response, packed as in `score`;
        under an aligned contract it samples every token again."""
        self.make_room()
        seeds = [request.sampling_seed for request in requests] if self.contract.is_aligned else []
        asked = _asked(requests, completions, temperature)
        images = [request.images for request in requests][::-1]
        return self.trainer.rescore(*asked, seeds[::-1], images)[::-1]

    def stop(self) -> None:
        """Stop the servers and the trainer's ranks."""
        self.rollout.stop()
        self._on_stop.close()


def _asked(
    requests: Sequence[Request], completions: Sequence[Completion], temperature: float
) -> tuple[list[list[int]], list[int], float, list[list[bytes]]]:
    """Return the arguments of `Trainer.log_probs`, in reverse order."""
    answers = list(zip(requests, completions, strict=True))[::-1]
    return (
        [[*request.prompt_ids, *completion.response_ids] for request, completion in answers],
        [len(request.prompt_ids) for request, _ in answers],
        temperature,
        [completion.kept_tokens for _, completion in answers],
    )
