"""Scores samples in worker processes, with a time limit for each that really ends it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

from pebble import ProcessExpired, ProcessPool

from onpolicy.config.groups import RewardConfig
from onpolicy.errors import ConfigError, RewardError
from onpolicy.rewards import load_rule, worker
from onpolicy.rewards.worker import Failure
from onpolicy.system import private_directory
from onpolicy.trajectory import Completion, FinishReason, Trajectory
from onpolicy.types import Prompt, Sample

logger = logging.getLogger(__name__)

FEWEST_WORKERS, MOST_WORKERS = 4, 32

START_SECONDS = 120.0
"""How long a worker may take to import a rule, besides the time limit of a sample."""


class Scorer:
    """Fills in the rewards of samples by the configured rule.

    Rewards depend on the samples alone: neither on the number of workers nor on who ends first.
    """

    def __init__(self, config: RewardConfig):
        self.config = config
        self._pool: ProcessPool | None = None
        self._rules: set[str] = set()
        self._has_reported = False

    def check_labels(self, prompts: Sequence[Prompt], name: str) -> None:
        """Raise ConfigError for the first label that the rule cannot read; `name`: flag and file."""
        for prompt in prompts:
            rule = prompt.rule or self.config.rm_type
            try:
                if rule:
                    load_rule(rule).check_label(prompt.label)
            except ValueError as error:
                raise ConfigError(
                    f"{name}: prompt {prompt.index}, label={prompt.label!r}: --rm-type {rule} cannot "
                    f"read it: {error}. Correct the row, or choose another rule."
                ) from error

    def try_out(self, prompt: Prompt) -> None:
        """Score a made-up response to `prompt`, its label, once. Raises ConfigError if that fails."""
        if prompt.rule or not self.config.custom_rm_path:
            return
        pool = _pool(self.config, workers=1)
        job = self._submit(pool, _made_up(prompt))
        try:
            result = _result(job, START_SECONDS + self.config.rm_time_limit)
        finally:
            pool.stop()
            pool.join()
        if result is None:
            limit = f"--rm-time-limit={self.config.rm_time_limit:g} seconds"
            result = Failure(reason=f"gave no result within {limit}")
        if isinstance(result, Failure):
            raise ConfigError(result.reason if result.in_loading else self._refusal(result.reason))

    def _refusal(self, reason: str) -> str:
        return (
            f"{self._name}: tried on the first prompt with its label as the response, it {reason}. It "
            'must take one Sample and return a number, or a dict with one under "score"; see '
            "docs/rewards.md."
        )

    def score(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Set every sample's reward and return metrics.

        A sample whose scoring takes too long or fails gets the reward 0 and is counted. Raises
        RewardError if more of them fail than --rm-max-error-rate lets pass, or if there is no rule.
        """
        has_rule = self.config.rm_type or self.config.custom_rm_path
        if unscored := [s for s in samples if not (s.prompt.rule or has_rule)]:
            raise RewardError(
                f"{unscored[0].name}: its episode said no reward, and no rule would. Say one, or give "
                "--rm-type or --custom-rm-path."
            )
        pool = self._pool_with({sample.prompt.rule for sample in samples} - {""})
        jobs = [self._submit(pool, sample) for sample in samples]
        timeouts, failed = 0, list[tuple[Sample, Failure]]()
        for sample, job in zip(samples, jobs, strict=True):
            result = _result(job)
            if isinstance(result, Failure):
                failed.append((sample, result))
            timeouts += result is None
            parts: worker.Result = result if isinstance(result, dict) else {"score": 0.0}
            sample.reward, sample.answer = parts.pop("score"), parts.pop(worker.ANSWER, None)
            sample.reward_parts = parts
        self._judge(failed, len(samples))
        return {
            "rollout/reward_timeouts": float(timeouts),
            "rollout/reward_errors": float(len(failed)),
        }

    def _pool_with(self, rules: set[str]) -> ProcessPool:
        """Workers that have imported these rules, since no sample's time is for that."""
        if self._pool is None or not rules <= self._rules:
            self.close()
            self._rules |= rules
            workers = self.config.rm_workers or default_workers()
            self._pool = _pool(self.config, workers, sorted(self._rules))
        return self._pool

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()

    @property
    def _name(self) -> str:
        config = self.config
        own = f"{worker.FLAG}={config.custom_rm_path}"
        return own if config.custom_rm_path else f"--rm-type={config.rm_type}"

    def _submit(self, pool: ProcessPool, sample: Sample) -> Any:
        arguments: list[Any] = [sample.response, sample.prompt.label]
        if sample.prompt.rule:
            arguments.append(sample.prompt.rule)
        elif self.config.custom_rm_path:
            # Megabytes that no rule looks at.
            trajectory = replace(sample.trajectory, routed_experts=None, kept_tokens=[])
            arguments = [replace(sample, trajectory=trajectory)]
        call = worker.score_by if sample.prompt.rule else worker.score
        return pool.schedule(call, args=arguments, timeout=self.config.rm_time_limit)

    def _judge(self, failed: Sequence[tuple[Sample, Failure]], num_samples: int) -> None:
        """Say what failed; raise RewardError if it is too much."""
        if not failed:
            return
        sample, failure = failed[0]
        count = f"{self._name}: {len(failed)} of {num_samples} samples could not be scored"
        logger.warning(
            "%s; they get the reward 0. The first, %s, %s", count, sample.name, failure.reason
        )
        if not self._has_reported:
            self._has_reported = True
            logger.error(
                "The first failure of %s: %s, label %r, response %.500r\n%s",
                self._name, sample.name, sample.prompt.label, sample.response, failure.traceback,
            )  # fmt: skip
        if len(failed) > self.config.rm_max_error_rate * num_samples:
            raise RewardError(
                f"{count}, more than --rm-max-error-rate={self.config.rm_max_error_rate:g} of them. The "
                f"first, {sample.name}, {failure.reason}. Mend the rule and resume from the last "
                "checkpoint with --load, or raise the limit."
            )


def default_workers() -> int:
    """As many as there are cores, within limits: scoring alternates with work that uses them all."""
    return min(max(len(os.sched_getaffinity(0)), FEWEST_WORKERS), MOST_WORKERS)


def _pool(config: RewardConfig, workers: int, rules: Sequence[str] = ()) -> ProcessPool:
    """Processes that have imported the run's rule, and those that samples name."""
    private_directory.of_this_process()  # its semaphores outlive all of us being killed at once
    return ProcessPool(
        max_workers=workers,
        initializer=worker.load,
        initargs=(config.rm_type, config.custom_rm_path, rules),
        # A fork of a process with threads, or with a GPU, may hang.
        context=multiprocessing.get_context("spawn"),
    )


def _made_up(prompt: Prompt) -> Sample:
    return Sample(
        prompt=prompt,
        sample_index=0,
        trajectory=Trajectory.begin(prompt.prompt_ids).plus(
            Completion(
                response_ids=prompt.prompt_ids[-1:],
                rollout_log_probs=[-1.0],
                finish_reason=FinishReason.STOP,
                weight_version=0,
                num_cached_tokens=0,
            ),
            temperature=1.0,
        ),
        response=prompt.label,
    )


def _result(job: Any, seconds: float | None = None) -> worker.Result | Failure | None:
    """What the worker says of a sample; None if the sample's time ran out."""
    try:
        outcome: worker.Result | Failure | None = job.result(seconds)
        return outcome
    except FutureTimeout:
        late = Failure(reason=f"was not imported after {seconds} seconds")
        return None if job.done() else late
    except BrokenProcessPool:
        return Failure(reason="ends the process that imports it")
    except ProcessExpired as error:
        code = error.exitcode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Failure(reason=f"ended its process ({how})")
