"""The reinforcement-learning step, and what repeats it.

Every rank of the trainer runs this loop. Rollout, rewards and files live on rank 0, whose results
(and errors) are shared with the others; training and gathering weights take all ranks.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from onpolicy.config import TrainConfig
from onpolicy.errors import CheckpointError, ConfigError
from onpolicy.metrics import Sink
from onpolicy.models.export import export_checkpoint
from onpolicy.progress import Progress
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.base import EnginesRestartedError
from onpolicy.rollout.sampling import group_samples, make_requests
from onpolicy.rollout.sglang import SglangGroup
from onpolicy.rollout.statistics import eval_metrics, rollout_metrics
from onpolicy.run_directory import RunDirectory, versions
from onpolicy.run_hash import RunHash
from onpolicy.start import Inputs, make_rollout_group, share_of_cores
from onpolicy.train import Trainer, checkpoint, distributed, make_trainer
from onpolicy.train.advantages import carries_signal, estimator
from onpolicy.types import Prompt, RunSummary, SampleGroup, SamplingParams, TrainSample
from onpolicy.weight_sync import Transport, make_transport, push_weights

logger = logging.getLogger(__name__)

MIB = 1 << 20


def train(config: TrainConfig, inputs: Inputs) -> RunSummary:
    """Run the configured reinforcement learning."""
    run = Run(config, inputs)
    try:
        run.start()
        run.push_weights()
        for step in range(run.first_step, config.rollout.num_rollout):
            run.evaluate_if_due(step)
            started = time.perf_counter()
            groups, rollout = run.roll_out(step)
            update = run.train(groups, step)
            sync = run.push_weights()
            perf = {"perf/step_time": time.perf_counter() - started}
            run.record(step, groups, {**rollout, **update, **sync, **perf})
            run.save_if_due(step + 1)
        run.evaluate_if_due(config.rollout.num_rollout)
        return run.summary()
    finally:
        run.stop()


class Run:
    """The parts of a run and how they work together; see `train` for when."""

    rollout: SglangGroup
    scorer: Scorer
    directory: RunDirectory
    transport: Transport
    progress: Progress
    trainer: Trainer

    def __init__(self, config: TrainConfig, inputs: Inputs):
        self.config, self.inputs, self.contract = config, inputs, inputs.contract
        self.first_step = 0
        self.weight_version = ""
        self.weight_digest = ""
        self.run_hash = RunHash()
        self.history: list[dict[str, float]] = []
        self.sinks: list[Sink] = []
        self._stops: list = []

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that samples, scores and writes."""
        return distributed.rank() == 0

    def start(self) -> None:
        """Load the trainer, resume if asked to, and start the engines."""
        config = self.config
        torch.manual_seed(config.seed)
        threads = config.engine.cpu_threads or share_of_cores(distributed.local_world_size())
        self.trainer = make_trainer(config, self.contract, threads)
        self._resume()
        distributed.run_on_rank_zero(self._start_main)

    def _start_main(self) -> None:
        config = self.config
        self.directory = RunDirectory(config.output.run_dir, resumes=self.first_step > 0)
        self.directory.write_records(config, self.contract)
        self.sinks = self.directory.sinks(config, self.first_step)
        self.transport = make_transport(config.sync.weight_sync, self.directory.path / "weights")
        self.scorer = Scorer(config.reward)
        self.rollout = make_rollout_group(
            engine=config.engine,
            hf_checkpoint=config.model.hf_checkpoint,
            hf_config=self.inputs.hf_config,
            contract=self.contract,
            seed=config.seed,
            trust_remote_code=config.model.trust_remote_code,
            sglang_args=config.sglang_args,
            log_directory=self.directory.logs,
            self_check_digest=self.trainer.self_check_digest,
        )
        self._stops += [self.rollout.stop, self.scorer.close]
        self.rollout.start()
        self.progress = Progress(config.rollout.num_rollout, self.first_step)
        self.rollout.on_progress = self.progress.on_response
        self._stops.append(self.progress.close)

    def push_weights(self) -> dict[str, float]:
        """Give the engines the trainer's weights, and have them prove it."""
        started = time.perf_counter()
        buckets = self.trainer.weight_buckets(self.config.sync.update_weight_buffer_size * MIB)
        self.weight_version = str(self.first_step + len(self.history))
        if self.is_main:
            self.weight_digest = push_weights(
                buckets, self.rollout.clients, self.transport, self.weight_version
            )
        else:
            for _ in buckets:
                pass
        return {"perf/weight_sync_time": time.perf_counter() - started}

    def roll_out(self, step: int) -> tuple[list[SampleGroup], dict[str, float]]:
        """Sample and score the prompts of a step."""
        started = time.perf_counter()
        rollout = self.config.rollout
        params = self._sampling(rollout.rollout_temperature, rollout.rollout_max_response_len)
        groups = self._sample(
            self.inputs.prompts.batch(step, rollout.rollout_batch_size),
            rollout.n_samples_per_prompt,
            params,
            self.config.seed, "rollout", step,
        )  # fmt: skip
        sampled = time.perf_counter()
        groups, scoring = self._score(groups)
        tokens = sum(len(s.response_ids) for group in groups for s in group.samples)
        return groups, {
            **rollout_metrics(groups),
            **scoring,
            "perf/rollout_time": time.perf_counter() - started,
            "perf/rollout_tokens_per_second": tokens / (sampled - started),
        }

    def train(self, groups: Sequence[SampleGroup], step: int) -> dict[str, float]:
        """Turn rewards into advantages and take the optimizer steps of a rollout."""
        algorithm = self.config.algorithm
        advantages = estimator(algorithm.advantage_estimator, algorithm.grpo_std_normalization)
        samples: list[TrainSample] = []
        num_filtered = 0
        for group in groups:
            rewards = [sample.reward for sample in group.samples]
            if algorithm.filter_equal_rewards and not carries_signal(rewards):
                num_filtered += 1
                continue
            samples += _train_samples(group, advantages(rewards))
        metrics = {"rollout/num_filtered_groups": float(num_filtered)}
        if not samples:
            logger.warning("step %d: all groups have equal rewards; nothing to train on", step)
            return metrics
        return {**self.trainer.train(samples, step), **metrics}

    def evaluate_if_due(self, step: int) -> None:
        """Sample and score the evaluation prompts before the first and after every k-th rollout."""
        evaluation = self.config.eval
        if not evaluation.eval_interval or step % evaluation.eval_interval:
            return
        length = evaluation.eval_max_response_len or self.config.rollout.rollout_max_response_len
        groups = self._sample(
            self.inputs.eval_prompts,
            evaluation.n_samples_per_eval_prompt,
            self._sampling(evaluation.eval_temperature, length),
            self.config.seed, "eval",
        )  # fmt: skip
        groups, _ = self._score(groups)
        metrics = eval_metrics(groups)
        for sink in self.sinks:
            sink.log(step, metrics)
        if self.is_main:
            logger.info("step %d: %s", step, json.dumps(metrics))

    def _sampling(self, temperature: float, max_new_tokens: int) -> SamplingParams:
        rollout = self.config.rollout
        return SamplingParams(
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self.inputs.stop_token_ids,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            min_p=rollout.rollout_min_p,
        )

    def _sample(
        self,
        prompts: list[Prompt],
        num_samples: int,
        params: SamplingParams,
        *seed_key: int | str,
    ) -> list[SampleGroup]:
        """Responses to prompts; engines that die on the way get the current weights again."""
        requests = make_requests(prompts, num_samples, params, *seed_key)

        def sample() -> list[SampleGroup]:
            completions = self.rollout.generate(requests)
            texts = self.inputs.tokenizer.batch_decode(
                [c.token_ids for c in completions], skip_special_tokens=True
            )
            return group_samples(prompts, completions, texts, self.weight_version)

        while True:
            try:
                return distributed.run_on_rank_zero(sample)
            except EnginesRestartedError:
                self.push_weights()

    def _score(self, groups: list[SampleGroup]) -> tuple[list[SampleGroup], dict[str, float]]:
        def score() -> tuple[list[SampleGroup], dict[str, float]]:
            return groups, self.scorer.score([s for group in groups for s in group.samples])

        return distributed.run_on_rank_zero(score)

    def record(
        self, step: int, groups: Sequence[SampleGroup], metrics: dict[str, float]
    ) -> None:
        """Log a finished step and add it to the run's hash."""
        self.history.append(metrics)
        self.run_hash.add_step(groups, metrics.get("train/loss", 0.0), self.weight_digest)
        if self.is_main:
            self.progress.on_step(step, metrics)
        for sink in self.sinks:
            sink.log(step, metrics)

    def save_if_due(self, done: int) -> None:
        """Write a checkpoint after every k-th rollout and after the last."""
        output = self.config.output
        last = done == self.config.rollout.num_rollout
        if output.save_interval and (last or done % output.save_interval == 0):
            self._save(Path(output.save), done)

    def _save(self, root: Path, done: int) -> None:
        partial = distributed.run_on_rank_zero(lambda: checkpoint.begin(root, done))
        try:
            self.trainer.save(partial)
            buckets = self.trainer.weight_buckets(
                self.config.sync.update_weight_buffer_size * MIB
            )
            if self.is_main:
                source = Path(self.config.model.hf_checkpoint)
                export_checkpoint(buckets, partial / "hf", source, self.contract.dtype)
                state = {
                    "rollouts_done": done,
                    "run_hash": self.run_hash.value,
                    "config": self.config.to_dict(),
                    "versions": versions(),
                }
                checkpoint.write_durably(partial / checkpoint.STATE, json.dumps(state, indent=2))
                final = checkpoint.commit(partial, root, done)
                logger.info("saved %s", final)
            else:
                for _ in buckets:
                    pass
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"--save={root}: the checkpoint of rollout {done} could not be written ({error}). The "
                f"latest complete one is {checkpoint.latest(root)}; free some space and resume from "
                "it with --load."
            ) from error

    def _resume(self) -> None:
        output = self.config.output
        found = checkpoint.latest(Path(output.load)) if output.load else None
        if found is None:
            if output.save and (other := checkpoint.latest(Path(output.save))):
                raise ConfigError(
                    f"--save={output.save}: holds checkpoints of another run ({other.name}), which "
                    f"this one would replace. Resume it with --load {output.save}, or choose another "
                    "directory."
                )
            return
        state = json.loads((found / checkpoint.STATE).read_text())
        if state["config"]["seed"] != self.config.seed:
            raise ConfigError(
                f"--seed={self.config.seed}: {found} was made with --seed={state['config']['seed']}, "
                "and a resumed run continues its samples. Give the same seed."
            )
        self.trainer.load(found)
        self.first_step = state["rollouts_done"]
        self.run_hash = RunHash(state["run_hash"])
        if self.is_main:
            logger.info("resumed from %s", found)

    def summary(self) -> RunSummary:
        """The run in a few numbers; plots are drawn on the way."""
        history = self.history or [{}]
        if self.is_main:
            from onpolicy.plot import plot_run

            plot_run(self.directory.metrics_file, self.directory.plots / "training.png")

        def total(name: str) -> int:
            return int(sum(metrics.get(name, 0) for metrics in history))

        return RunSummary(
            run_dir=self.config.output.run_dir,
            run_hash=self.run_hash.value,
            rollouts=len(self.history),
            first_reward=history[0].get("rollout/raw_reward", 0.0),
            last_reward=history[-1].get("rollout/raw_reward", 0.0),
            num_compared_tokens=total("parity/num_compared_tokens"),
            num_mismatched_tokens=total("parity/num_mismatched_tokens"),
        )

    def stop(self) -> None:
        """End everything that was started, whatever happened."""
        for stop in reversed(self._stops):
            stop()
        for sink in self.sinks:
            sink.close()


def _train_samples(group: SampleGroup, advantages: Sequence[float]) -> list[TrainSample]:
    return [
        TrainSample(
            token_ids=sample.token_ids,
            prompt_len=len(group.prompt.token_ids),
            rollout_log_probs=sample.rollout_log_probs,
            advantage=advantage,
            label=f"prompt {group.prompt.index}, sample {sample.sample_index}",
        )
        for sample, advantage in zip(group.samples, advantages, strict=True)
    ]
