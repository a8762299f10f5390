"""The trainer of both training engines: it turns a rollout's samples into optimizer steps.

Its operators pass a self-check first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from fallback_correction.tokens import NonfiniteError
from onpolicy.compat.process import give_back_buffers
from onpolicy.config import TrainConfig
from onpolicy.config.groups import FallbackConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError, TrainingError
from onpolicy.images.placed import PlacedImage
from onpolicy.models.policy import PackedTokens
from onpolicy.models.shared_prefixes import share_prefixes
from onpolicy.ops import Operators, make_operators
from onpolicy.ops.checks.gradient_check import check_gradients
from onpolicy.ops.checks.self_check import self_check
from onpolicy.ops.draws import Draws
from onpolicy.training import distributed
from onpolicy.training.advantages import Estimator, RewardEstimator, TokenBaseline
from onpolicy.training.base import Rescored, Trainer, TrainerMemory
from onpolicy.training.critic import GaeEstimator
from onpolicy.training.engine import ShardedModel, TrainingEngine
from onpolicy.training.learner import Learner, Models
from onpolicy.training.offload import Offload
from onpolicy.training.shares import Outcomes, Steps, make_shares, pack
from onpolicy.training.state import load_state, save_state
from onpolicy.training.teachers import teacher_role, with_teacher
from onpolicy.training.weight_outlet import WeightOutlet, bucket_bytes, export
from onpolicy.types import Sample, TrainOutcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

CRITIC = "critic"
"""Folder of the critic in a checkpoint: its state, and `hf`, a token classifier of transformers."""


class PolicyTrainer(WeightOutlet, Trainer):
    """One rank of the trainer, or the only one.

    It holds the models of a training engine, one for each role; a `WeightOutlet` hands the policy's
    weights over.
    """

    def __init__(
        self,
        config: TrainConfig,
        contract: NumericsContract,
        num_threads: int,
        load_model: TrainingEngine,
        estimator: Estimator | None = None,
    ):
        self.config, self.num_threads = config, num_threads
        torch.manual_seed(config.seed)
        self.device = distributed.device(contract.device)
        self._use_contract(contract)
        source, algorithm = config.model.hf_checkpoint, config.algorithm
        estimator = with_teacher(config, estimator or _estimator(config))
        load_rounded = partial(load_model, rounds=True)
        self.models: Models = {"policy": load_rounded(source, self.operators, trained=True)}
        if algorithm.reads_reference or "reference" in estimator.roles:
            base = None if algorithm.ref_checkpoint else self.policy.without_adapters()
            reference = algorithm.ref_checkpoint or source
            self.models["reference"] = base or load_rounded(
                reference, self.operators, trained=False
            )
        if "critic" in estimator.roles:
            path = config.critic_checkpoint
            self.models["critic"] = load_model(path, self.operators, trained=True, has_values=True)
        for name, path in config.distillation.teachers.items():
            self.models[teacher_role(name)] = load_model(path, self.operators, trained=False)
        self._away: dict[TrainerMemory, Offload] = {"state": Offload(), "weights": Offload()}
        super().__init__(config, contract, self.policy)
        self.learner = Learner(config, self.models, estimator, self.device)

    def _use_contract(self, contract: NumericsContract) -> None:
        longest = self.config.trainer.max_tokens_per_gpu
        self.contract = contract
        self.operators, self.self_check = checked_operators(contract, self.num_threads, longest)

    @property
    def policy(self) -> ShardedModel:
        """Return the model that is sampled from and trained."""
        return self.models["policy"]

    def adapt(self, contract: NumericsContract, fallback: FallbackConfig, centers: bool) -> None:
        if contract != self.contract:
            self._bring_back("weights")
            self._use_contract(contract)
            for model in self.models.values():
                model.use(self.operators)
        self.learner.corrections.use(fallback, centers)

    def train(self, samples: Sequence[Sample], step: int, rates: Sequence[float]) -> TrainOutcome:
        flags, num_ranks = self.config.trainer, distributed.data_size()
        most, shared = flags.max_tokens_per_gpu, flags.shares_prefixes
        shares = make_shares(samples, len(rates), num_ranks, most, shared)
        outcomes = Outcomes.of(samples, len(rates))
        return self.train_share(shares[distributed.data_rank()], outcomes, step, rates)

    def train_share(
        self, share: Steps, outcomes: Outcomes, step: int, rates: Sequence[float]
    ) -> TrainOutcome:
        """Train as `train` does, on a rank that received only its own share of the samples."""
        start = time.perf_counter()
        self._bring_back("weights", "state")
        try:
            outcome = self.learner.learn(share, outcomes, rates, step, self.contract)
        except NonfiniteError as error:
            how = self.learner.corrections.flags.tis_nonfinite
            raise TrainingError(f"--tis-nonfinite={how}: {error}") from error
        give_back_buffers()
        seconds = time.perf_counter() - start
        speed = {
            "perf/train_time": seconds,
            "perf/train_tokens_per_second": outcomes.num_tokens / seconds,
        }
        return replace(outcome, metrics={**outcome.metrics, **self.push_metrics, **speed})

    def release_memory(self, kind: TrainerMemory) -> None:
        models = self.models.values()
        state = [x for model in models for x in model.optimizer_tensors()]
        others = [model for model in models if model.module is not self.policy.module]
        state += [x for model in others for x in model.module.parameters()]
        dropped = [x for model in models for x in model.gradient_buffers()]
        self._away["state"].take(state, dropped)
        if kind == "weights":
            self._away["weights"].take(self.policy.module.parameters())

    def _bring_back(self, *kinds: TrainerMemory) -> None:
        for kind in kinds:
            self._away[kind].bring_back()

    def rescore(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        temperature: float,
        kept_tokens: Sequence[list[bytes]] = (),
        seeds: Sequence[int] = (),
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> list[Rescored]:
        self._bring_back("weights")
        # Each data-parallel rank scores a share of the sequences, in micro-batches within its budget.
        lens, most = [len(s) for s in sequences], self.config.trainer.max_tokens_per_gpu
        plan = pack(lens, distributed.data_size(), most)[distributed.data_rank()]
        batches = [
            PackedTokens.after_prompts(
                [sequences[i] for i in indices] or [[0, 0]],
                [prompt_lens[i] for i in indices] or [1],
                temperature,
                kept_tokens=[kept_tokens[i] for i in indices] if any(kept_tokens) else (),
                images=[images[i] for i in indices] if images else (),
            ).with_own_cut(self.learner.cut, always=self.contract.is_aligned)
            for indices in plan
        ]
        if seeds:
            rows = self.config.parity.parity_check == "full"
            draws = [
                _draws([(seeds[i], prompt_lens[i], lens[i]) for i in part], rows) for part in plan
            ]
            batches = [replace(x, draws=own) for x, own in zip(batches, draws, strict=True)]
        if self.config.trainer.shares_prefixes:
            batches = [share_prefixes(batch) for batch in batches]
        batches = [batch.on(self.device) for batch in batches]
        mine: dict[int, Rescored] = {}
        for indices, scores in zip(plan, self.policy.score(batches), strict=True):
            responses = [lens[i] - prompt_lens[i] for i in indices]
            told = scores.log_probs, scores.drawn, scores.row_digests
            parts = (x[: sum(responses)].cpu().split(responses) for x in told)
            mine.update(zip(indices, map(Rescored, *parts), strict=True))
        return list(distributed.gather_by_number(mine).values())

    def on_each_rank(self, function: Callable[..., T], *args: Any) -> list[T]:
        return [function(self, *args)]

    def save(self, directory: Path) -> None:
        self._bring_back("weights", "state")
        numbers = self.learner.state_dict()
        save_state(directory, numbers, self.policy.write_tensors)
        if critic := self.models.get("critic"):
            distributed.run_on_rank_zero((directory / CRITIC).mkdir)
            save_state(directory / CRITIC, {}, critic.write_tensors)
            made_from, dtype = self.config.critic_checkpoint, self.contract.dtype
            to, most = directory / CRITIC / "hf", bucket_bytes(self.config)
            export(critic, made_from, to, dtype, most, has_values=True)

    def load(self, directory: Path) -> None:
        self._bring_back("weights", "state")
        numbers = load_state(directory, self.policy.read_tensors)
        if critic := self.models.get("critic"):
            load_state(directory / CRITIC, critic.read_tensors)
        try:
            self.learner.load_state_dict(numbers)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"--load: what the checkpoint holds of the corrections does not fit these settings "
                f"({error!r}). Give --dc-* as in the run that wrote it."
            ) from error


def _draws(sequences: Sequence[tuple[int, int, int]], with_rows: bool) -> Draws:
    """Return how the tokens after the prompts were drawn, from (seed, prompt tokens, all tokens) of
    each sequence; without sequences, the draw of a filler's one token, which is not redrawn."""
    asked = [(seed, place - 1) for seed, prompt, end in sequences for place in range(prompt, end)]
    seeds, positions = zip(*asked, strict=True) if sequences else ((None,), (0,))
    return Draws.of(seeds, positions, with_rows)


def _estimator(config: TrainConfig) -> Estimator:
    algorithm = config.algorithm
    if algorithm.advantage_estimator == "gae":
        return GaeEstimator(config.critic, algorithm.gamma)
    if algorithm.advantage_estimator == "otb":
        return TokenBaseline()
    return RewardEstimator(algorithm.advantage_estimator, algorithm.gamma)


def checked_operators(
    contract: NumericsContract, num_threads: int, longest: int
) -> tuple[Operators, dict[str, str]]:
    """Return the operators of a contract, and the digests of their self-check: empty under a stock
    contract.

    longest: the number of tokens of the largest batch.
    """
    operators = make_operators(contract, num_threads)
    if not contract.is_aligned:
        return operators, {}
    logger.info("checking the trainer's operators at the model's shapes")
    digests = self_check(operators, contract, longest)
    check_gradients(operators, contract)
    return operators, digests
