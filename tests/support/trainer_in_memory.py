"""A trainer of the tiny policy, and the pair that it forms with engines in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import compress, count
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
from onpolicy.rollout.sglang import SglangGroup
from onpolicy.run.engines import EnginePair, MakeTrainer
from onpolicy.train import Trainer, distributed
from onpolicy.train.base import Rescored, TrainerMemory
from onpolicy.train.batch import PackedBatch, packed_batch
from onpolicy.train.parity_gate import ParityGate
from onpolicy.train.redraw import with_draws
from onpolicy.train.shares import Outcomes, make_shares, split_into_steps
from onpolicy.train.weight_outlet import WeightOutlet
from onpolicy.types import ParityFindings, Sample, TrainOutcome, TrainSample
from onpolicy.weights.digest import WeightBucket, WeightPart
from onpolicy.weights.push import Engine
from tests.support.engines_in_memory import SELF_CHECK, Host
from tests.support.tiny_policy import ALIGNED, draw_again, log_probs_of, make_weights
from tests.support.weight_digests import digest_of

WHOLE = 1 << 40
"""Tokens of a micro-batch that holds all."""


class TrainerInMemory(Trainer):
    """Raises the logits of tokens with a positive advantage; every rank holds and trains all."""

    def __init__(self, config: TrainConfig, contract: NumericsContract, logs: Path):
        distributed.init_process_group()
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
        gate, findings = self._compared(samples, scores, step, len(rates))
        advantages = self._advantages(samples)
        for part, rate in zip(split_into_steps(samples, len(rates)), rates, strict=True):
            for i in part:
                self._learn(samples[i].sample, rate * advantages[i])
        gains = [
            advantage * float(train.mean())
            for advantage, train in zip(advantages, scores, strict=True)
        ]
        metrics = {"train/loss": -sum(gains) / len(gains), "train/lr": rates[-1], **gate.metrics()}
        metrics["perf/train_time"] = 0.0
        return TrainOutcome(metrics=metrics, findings=findings)

    def _compared(
        self, samples: Sequence[TrainSample], scores: Sequence[Tensor], step: int, num_steps: int
    ) -> tuple[ParityGate, ParityFindings]:
        """The run's own gate, which has seen this rank's share of the first optimizer step."""
        shares = make_shares(samples, num_steps, distributed.data_size(), WHOLE)
        share = shares[distributed.data_rank()]
        gate = ParityGate.of(self.config, step, self.contract, share.sampled)
        try:
            for part in share.micro_batches(0):
                batch = packed_batch(part, torch.device("cpu"))
                if gate.expected is not None:
                    batch = with_draws(batch, self.config.parity.redraw_share, self.config.seed)
                own = [scores[i] for i in part] or [torch.zeros(1)]
                gate.check(torch.cat(own), batch, None, self._drawn(batch))
            gate.require_all()
        except ParityError as error:
            error.findings = gate.findings(len(samples), gate.first_apart())
            raise
        return gate, gate.findings(len(samples), None)

    def _drawn(self, batch: PackedBatch) -> Tensor:
        """The tokens that are to be drawn again: float32 [R]. Engines in memory draw a token at its own
        place, which is one more than the position before it."""
        found = torch.full((len(batch.packed.rows),), torch.nan)
        if (draws := batch.packed.draws) is None:
            return found
        samples = [s.sample for s in batch.samples]
        contexts = [
            (sample.token_ids[:place], sample.trajectory.temperatures[number])
            for sample in samples
            for number, place in enumerate(compress(count(), sample.trajectory.sampled))
        ]
        for row in draws.chosen.nonzero()[:, 0].tolist():
            assert len(contexts[row][0]) == int(draws.positions[row]) + 1
            found[row] = draw_again(self.weights, *contexts[row], int(draws.seeds[row]))
        return found

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

    def rescore(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        temperature: float,
        kept_tokens: Sequence[list[bytes]] = (),
        seeds: Sequence[int] = (),
    ) -> list[Rescored]:
        found = []
        for i, (tokens, end) in enumerate(zip(sequences, prompt_lens, strict=True)):
            scores = log_probs_of(self.weights, tokens[:end], tokens[end:], temperature)
            drawn = [
                draw_again(self.weights, tokens[:place], temperature, seeds[i])
                if seeds
                else torch.nan
                for place in range(end, len(tokens))
            ]
            found.append(Rescored(scores, torch.tensor(drawn, dtype=torch.float32)))
        return found

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
