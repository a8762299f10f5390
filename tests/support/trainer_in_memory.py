"""A trainer of the tiny policy, and the pair that it forms with engines in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from onpolicy.algorithm.advantages import group_advantages
from onpolicy.config import TrainConfig, groups
from onpolicy.config.groups import FallbackConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ParityError
from onpolicy.parity import ParityCounts, compare_log_probs
from onpolicy.rollout.sglang import SglangGroup
from onpolicy.run.engines import EnginePair, MakeTrainer
from onpolicy.train import Trainer, distributed
from onpolicy.train.base import TrainerMemory
from onpolicy.train.shares import Outcomes, split_into_steps
from onpolicy.train.weight_outlet import WeightOutlet
from onpolicy.types import ParityFindings, Sample, TrainOutcome, TrainSample
from onpolicy.weights.digest import WeightBucket, WeightPart
from onpolicy.weights.push import Engine
from tests.support.engines_in_memory import SELF_CHECK, Host
from tests.support.tiny_policy import ALIGNED, log_probs_of, make_weights
from tests.support.weight_digests import digest_of


class TrainerInMemory(Trainer):
    """Raises the logits of tokens with a positive advantage; every rank holds and trains all."""

    def __init__(self, config: TrainConfig, contract: NumericsContract, logs: Path):
        self.config, self.fallback = config, config.fallback
        self.released: list[str] = []
        """What servers on the same GPUs were given, in order."""
        self.weights, self.frozen = make_weights(), tuple[str, ...]()
        self.outlet = WeightOutlet(config, contract, self)
        self._use(contract)

    def _use(self, contract: NumericsContract) -> None:
        self.contract = contract
        self.self_check = SELF_CHECK if contract.is_aligned else {}

    def adapt(self, contract: NumericsContract, fallback: FallbackConfig) -> None:
        self._use(contract)
        self.fallback = fallback

    def train(
        self, samples: Sequence[TrainSample], step: int, rates: Sequence[float]
    ) -> TrainOutcome:
        scores = [self._score(trained.sample) for trained in samples]
        found = [_compared(train, trained) for train, trained in zip(scores, samples, strict=True)]
        counts = [each.num_mismatched for each in found]
        total = sum(found, ParityCounts())
        if self.contract.is_aligned and total.num_mismatched:
            first = next(i for i, counts in enumerate(found) if counts.num_mismatched)
            error = ParityError(f"{total.num_mismatched} of {total.num_compared} tokens differ")
            apart = first, scores[first].tolist()
            error.findings = ParityFindings(mismatched_tokens=counts, apart=apart)
            raise error
        advantages = self._advantages(samples)
        for part, rate in zip(split_into_steps(samples, len(rates)), rates, strict=True):
            for i in part:
                self._learn(samples[i].sample, rate * advantages[i])
        gains = [
            advantage * float(train.mean())
            for advantage, train in zip(advantages, scores, strict=True)
        ]
        metrics = {"train/loss": -sum(gains) / len(gains), "train/lr": rates[-1], **total.metrics()}
        metrics["perf/train_time"] = 0.0
        return TrainOutcome(metrics=metrics, findings=ParityFindings(mismatched_tokens=counts))

    def _advantages(self, samples: Sequence[TrainSample]) -> list[float]:
        outcomes, kind = Outcomes.of(samples), self.config.algorithm.advantage_estimator
        of = outcomes.rewards, kind, outcomes.lengths, outcomes.episodes, outcomes.baselines
        groups = group_advantages(*of)
        return [advantage for group in groups for advantage in group]

    def _score(self, sample: Sample) -> Tensor:
        tokens, sampled = sample.token_ids, torch.tensor(sample.trajectory.sampled)
        temperatures = sample.trajectory.temperatures
        scores = {
            each: log_probs_of(self.weights, tokens[:1], tokens[1:], each)[sampled[1:]]
            for each in {*temperatures}
        }
        return torch.stack([scores[each][i] for i, each in enumerate(temperatures)])

    def _learn(self, sample: Sample, size: float) -> None:
        tokens, sampled = sample.token_ids, sample.trajectory.sampled
        for distance, (name, table) in enumerate(self.weights.items(), start=1):
            if name in self.frozen:
                continue
            for end in range(distance, len(tokens)):
                if sampled[end]:
                    table[tokens[end - distance], tokens[end]] += size

    def log_probs(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        temperature: float,
        kept_tokens: Sequence[list[bytes]] = (),
    ) -> list[Tensor]:
        return [
            log_probs_of(self.weights, tokens[:end], tokens[end:], temperature)
            for tokens, end in zip(sequences, prompt_lens, strict=True)
        ]

    def on_each_rank(self, function: Any, *args: Any) -> Any:
        raise AssertionError("a table has no models")

    def push(self, engines: Sequence[Engine], version: str) -> str:
        return self.outlet.push(engines, version, self.contract)

    def push_again(self, engines: Sequence[Engine], version: str) -> str:
        return self.outlet.push_again(engines, version, self.contract)

    def export(self, directory: Path) -> None:
        self.outlet.export(directory, self.contract.dtype)

    def release_memory(self, kind: TrainerMemory) -> None:
        self.released.append(kind)

    def close(self) -> None:
        self.outlet.close()

    def weight_buckets(
        self,
        max_bytes: int,
        part: WeightPart = "all",
        ranks: Collection[int] = (0,),
        masters: bool = False,
    ) -> Iterator[WeightBucket]:
        for name, table in self.weights.items():
            if part in ("all", "frozen" if name in self.frozen else "trained"):
                assert distributed.gather_data(name) == [name] * distributed.data_size()
                if distributed.rank() in ranks:
                    yield [(name, table.clone())]

    def frozen_digest(self) -> str:
        frozen = {name: self.weights[name] for name in self.frozen}
        return digest_of(frozen) if frozen else ""

    def save(self, directory: Path) -> None:
        if distributed.rank() == 0:
            save_file(self.weights, directory / "weights.safetensors")

    def load(self, directory: Path) -> None:
        self.weights = load_file(directory / "weights.safetensors")


def _compared(train: Tensor, trained: TrainSample) -> ParityCounts:
    """The tokens that were sampled from this policy."""
    fresh = torch.tensor(trained.lags) == 0
    rollout = torch.tensor(trained.sample.rollout_log_probs)
    return compare_log_probs(train[fresh], rollout[fresh])[0]


def pair_maker(
    host: Host, make_trainer: MakeTrainer = TrainerInMemory
) -> Callable[[TrainConfig, Any, NumericsContract, Path], EnginePair]:
    """Makes, as `EnginePair` does, a trainer and servers on the host."""

    def make_rollout(
        config: TrainConfig, hf_config: Any, contract: NumericsContract, logs: Path, longest: int
    ) -> SglangGroup:
        return host.make_group(config.engine, contract, logs)

    return partial(EnginePair, make_rollout=make_rollout, make_trainer=make_trainer)


def make_pair(
    host: Host,
    directory: Path,
    contract: NumericsContract = ALIGNED,
    weight_sync: Literal["disk", "tensor"] = "disk",
    lag: int = 0,
    **engine: Any,
) -> EnginePair:
    """A pair that is not started yet. `engine`: of `EngineConfig`."""
    config = TrainConfig(
        engine=groups.EngineConfig(**engine),
        parity=groups.ParityConfig(true_on_policy_mode=contract.is_aligned),
        sync=groups.WeightSyncConfig(weight_sync=weight_sync),
        rollout=groups.RolloutConfig(rollout_lag=lag),
        output=groups.OutputConfig(run_dir=str(directory)),
    )
    return pair_maker(host)(config, None, contract, directory)
