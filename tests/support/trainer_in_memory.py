"""A trainer of the tiny policy, and the pair that it forms with engines in memory."""

from functools import partial
from itertools import compress, count

import torch
from safetensors.torch import load_file, save_file

from onpolicy.algorithm.estimators import group_advantages
from onpolicy.config import TrainConfig, groups
from onpolicy.errors import ParityError
from onpolicy.run.engines import EnginePair
from onpolicy.training import Trainer, distributed
from onpolicy.training.base import Rescored
from onpolicy.training.batch import packed_batch
from onpolicy.training.learner import with_draws
from onpolicy.training.parity_gate import ParityGate
from onpolicy.training.shares import Outcomes, make_shares, split_into_steps
from onpolicy.training.weight_outlet import WeightOutlet
from onpolicy.types import TrainOutcome
from tests.support.engines_in_memory import SELF_CHECK
from tests.support.tiny_policy import ALIGNED, draw_again, log_probs_of, make_weights
from tests.support.weight_digests import digest_of

WHOLE = 1 << 40
"""Tokens of a micro-batch that holds all."""


class TrainerInMemory(WeightOutlet, Trainer):
    """Raises the logits of tokens with a positive advantage; every rank holds and trains all."""

    def __init__(self, config, contract, logs):
        distributed.init_process_group()
        self.config, self.fallback = config, config.fallback
        self.released = []
        """What servers on the same GPUs were given, in order."""
        self.weights, self.frozen = make_weights(), tuple[str, ...]()
        super().__init__(config, contract, self)
        self._use(contract)

    def _use(self, contract):
        self.contract = contract
        self.self_check = SELF_CHECK if contract.is_aligned else {}

    def adapt(self, contract, fallback, centers):
        self._use(contract)
        self.fallback = fallback

    def train(self, samples, step, rates):
        scores = [self._score(trained) for trained in samples]
        gate, findings = self._compared(samples, scores, step, len(rates))
        advantages = self._advantages(samples)
        for part, rate in zip(split_into_steps(samples, len(rates)), rates, strict=True):
            for i in part:
                self._learn(samples[i], rate * advantages[i])
        gains = [
            advantage * float(train.mean())
            for advantage, train in zip(advantages, scores, strict=True)
        ]
        metrics = {"train/loss": -sum(gains) / len(gains), "train/lr": rates[-1], **gate.metrics()}
        metrics["perf/train_time"] = 0.0
        return TrainOutcome(metrics=metrics, findings=findings)

    def _compared(self, samples, scores, step, num_steps):
        """The run's own gate, which has seen this rank's share of the first optimizer step."""
        shares = make_shares(samples, num_steps, distributed.data_size(), WHOLE)
        share = shares[distributed.data_rank()]
        sampled = Outcomes.of(samples, num_steps).sampled
        gate = ParityGate.of(self.config, step, self.contract, sampled)
        try:
            for part in share[0]:
                batch = packed_batch(part, torch.device("cpu"))
                if gate.expected is not None:
                    batch = with_draws(batch)
                own = [scores[i] for i in part] or [torch.zeros(1)]
                gate.check(torch.cat(own), batch, self._drawn(batch))
            gate.require_all()
        except ParityError as error:
            error.findings = gate.findings(len(samples), gate.first_apart())
            raise
        return gate, gate.findings(len(samples), None)

    def _drawn(self, batch):
        """The tokens that are to be drawn again: float32 [R]. Engines in memory draw a token at its own
        place, which is one more than the position before it."""
        found = torch.full((len(batch.packed.rows),), torch.nan)
        if (draws := batch.packed.draws) is None:
            return found
        samples = batch.samples
        contexts = [
            (sample.token_ids[:place], sample.trajectory.temperatures[number])
            for sample in samples
            for number, place in enumerate(compress(count(), sample.trajectory.sampled))
        ]
        for row in draws.chosen.nonzero()[:, 0].tolist():
            assert len(contexts[row][0]) == int(draws.positions[row]) + 1
            found[row] = draw_again(self.weights, *contexts[row], int(draws.seeds[row]))
        return found

    def _advantages(self, samples):
        outcomes, kind = Outcomes.of(samples, 1), self.config.algorithm.advantage_estimator
        of = outcomes.rewards, kind, outcomes.lengths, outcomes.episodes
        groups = group_advantages(*of)
        return [advantage for group in groups for advantage in group]

    def _score(self, sample):
        tokens, sampled = sample.token_ids, torch.tensor(sample.trajectory.sampled)
        temperatures = sample.trajectory.temperatures
        scores = {
            each: log_probs_of(self.weights, tokens[:1], tokens[1:], each)[sampled[1:]]
            for each in {*temperatures}
        }
        return torch.stack([scores[each][i] for i, each in enumerate(temperatures)])

    def _learn(self, sample, size):
        tokens, sampled = sample.token_ids, sample.trajectory.sampled
        for distance, (name, table) in enumerate(self.weights.items(), start=1):
            if name in self.frozen:
                continue
            for end in range(distance, len(tokens)):
                if sampled[end]:
                    table[tokens[end - distance], tokens[end]] += size

    def rescore(self, sequences, prompt_lens, temperature, kept_tokens=(), seeds=(), images=()):
        found = []
        for i, (tokens, end) in enumerate(zip(sequences, prompt_lens, strict=True)):
            scores = log_probs_of(self.weights, tokens[:end], tokens[end:], temperature)
            drawn = [
                draw_again(self.weights, tokens[:place], temperature, seeds[i])
                if seeds
                else torch.nan
                for place in range(end, len(tokens))
            ]
            none = torch.zeros(len(drawn), dtype=torch.int64)
            found.append(Rescored(scores, torch.tensor(drawn, dtype=torch.float32), none))
        return found

    def on_each_rank(self, function, *args):
        raise AssertionError("a table has no models")

    def release_memory(self, kind):
        self.released.append(kind)

    def weight_buckets(self, max_bytes, part="all", ranks=(0,), masters=False):
        for name, table in self.weights.items():
            if part in ("all", "frozen" if name in self.frozen else "trained"):
                assert distributed.gather_data(name) == [name] * distributed.data_size()
                if distributed.rank() in ranks:
                    yield [(name, table.clone())]

    def frozen_digest(self):
        frozen = {name: self.weights[name] for name in self.frozen}
        return digest_of(frozen) if frozen else ""

    def save(self, directory):
        if distributed.rank() == 0:
            save_file(self.weights, directory / "weights.safetensors")

    def load(self, directory):
        self.weights = load_file(directory / "weights.safetensors")


def pair_maker(host, make_trainer=TrainerInMemory):
    def make_rollout(config, hf_config, contract, logs, longest):
        digests_rows = config.parity.parity_check == "full" and contract.is_aligned
        return host.make_group(config.engine, contract, logs, digests_rows=digests_rows)

    return partial(EnginePair, make_rollout=make_rollout, make_trainer=make_trainer)


def make_pair(host, directory, contract=ALIGNED, weight_sync="disk", lag=0, **engine):
    """A pair that is not started yet. `engine`: of `EngineConfig`."""
    config = TrainConfig(
        engine=groups.EngineConfig(**engine),
        parity=groups.ParityConfig(true_on_policy_mode=contract.is_aligned),
        sync=groups.WeightSyncConfig(weight_sync=weight_sync),
        rollout=groups.RolloutConfig(rollout_lag=lag),
        output=groups.OutputConfig(run_dir=str(directory)),
    )
    return pair_maker(host)(config, None, contract, directory)
