"""Names and meanings of everything a run logs, and where it goes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MEANINGS = {
    "rollout/raw_reward": "mean reward of the rollout's samples",
    "rollout/reward_std": "standard deviation of those rewards",
    "rollout/reward_timeouts": "samples that the reward rule did not finish in time; they score 0",
    "rollout/response_length": "mean length of the responses, in tokens",
    "rollout/response_length_max": "length of the longest response",
    "rollout/truncated_ratio": "share of responses that reached the length limit",
    "rollout/log_probs": "mean log-probability of the sampled tokens, from the rollout engine",
    "rollout/num_cached_tokens": "prompt tokens that were found in the engines' prefix caches",
    "rollout/num_filtered_groups": "groups left out because all their rewards are equal",
    "parity/num_compared_tokens": "tokens of the first optimizer step, all compared bit by bit",
    "parity/num_mismatched_tokens": "tokens among them with another log-probability in training",
    "parity/max_ulp": "largest distance between two such values, in representable numbers",
    "train/train_rollout_logprob_abs_diff": "mean |train - rollout| over the compared tokens",
    "train/k3_kl": "mean exp(r) - r - 1, r = train - rollout, over the compared tokens",
    "train/loss": "loss of the optimizer steps, on average",
    "train/pg_loss": "its policy-gradient term",
    "train/pg_clipfrac": "share of tokens whose ratio was clipped",
    "train/ppo_kl": "mean old - new log-probability",
    "train/kl_loss": "KL penalty towards the reference model, before its coefficient",
    "train/entropy": "entropy of the policy at the sampled tokens, in nats",
    "train/grad_norm": "norm of the gradient before clipping",
    "train/lr": "learning rate",
    "perf/rollout_time": "seconds of sampling and scoring",
    "perf/rollout_tokens_per_second": "response tokens per second of sampling",
    "perf/train_time": "seconds of training",
    "perf/train_tokens_per_second": "prompt and response tokens per second of training",
    "perf/weight_sync_time": "seconds to push the weights and verify them",
    "perf/step_time": "seconds of the whole step",
    "eval/avg@k": "mean reward over evaluation prompts and their k samples",
    "eval/pass@k": "share of evaluation prompts with a sample of positive reward",
    "eval/truncated_ratio": "share of evaluation responses that reached the length limit",
    "eval/response_length": "mean length of evaluation responses",
}
"""Reward functions may add `rollout/reward/<name>` for the further numbers they return."""


class Sink(ABC):
    """A place that metrics go to."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def close(self) -> None:
        """Finish writing."""


class JsonlSink(Sink):
    """One JSON object per line and step, written through at once."""

    def __init__(self, file: Path, first_step: int):
        # A resumed run repeats the steps after its checkpoint; their old lines go.
        if file.exists():
            kept = [record for record in read_jsonl(file) if record["step"] < first_step]
            partial = file.with_suffix(".partial")
            partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
            partial.replace(file)
        self._file = file.open("a")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink(Sink):
    def __init__(self, directory: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink(Sink):
    def __init__(self, project: str, directory: Path, config: Mapping[str, Any]):
        import wandb

        self._run = wandb.init(project=project, dir=str(directory), config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line cut short by a kill is left out."""
    records = []
    for line in file.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
