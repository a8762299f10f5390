"""Totals, summary and hash of a run."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onpolicy.types import SampleGroup


@dataclass(slots=True, kw_only=True, frozen=True)
class RunTotals:
    """The totals of a run from its first rollout on, however often it was resumed."""

    first_reward: float = 0.0
    last_reward: float = 0.0
    num_compared_tokens: int = 0
    num_mismatched_tokens: int = 0

    num_unscored: int = 0
    """Samples that could not be scored, so that nothing was learnt from them."""

    num_repeats: int = 0
    """Calls of reward rules that were late, or ended their process, and were repeated."""

    def plus(self, metrics: Mapping[str, float], is_first: bool) -> RunTotals:
        """Return the totals with one more rollout."""
        reward = metrics.get("rollout/raw_reward", self.last_reward)
        compared, mismatched = parity_of(metrics)
        unscored = int(metrics.get("rollout/num_unscored", 0))
        repeats = int(metrics.get("rollout/reward_repeats", 0))
        return RunTotals(
            first_reward=reward if is_first else self.first_reward,
            last_reward=reward,
            num_compared_tokens=self.num_compared_tokens + compared,
            num_mismatched_tokens=self.num_mismatched_tokens + mismatched,
            num_unscored=self.num_unscored + unscored,
            num_repeats=self.num_repeats + repeats,
        )


def parity_of(metrics: Mapping[str, float]) -> tuple[int, int]:
    """Return how many tokens a step compared, in training and by a probe, and how many differed."""
    compared, mismatched = (
        sum(int(metrics.get(f"{kind}/num_{what}_tokens", 0)) for kind in ("parity", "probe"))
        for what in ("compared", "mismatched")
    )
    return compared, mismatched


@dataclass(slots=True, kw_only=True, frozen=True)
class RunSummary:
    """The result of a run."""

    run_dir: str

    run_hash: str
    """The hash, equal for two runs whose samples, rewards, losses and weights are the same bits."""

    rollouts: int
    """Rollouts of the whole run, those before a resume included."""

    totals: RunTotals


class RunHash:
    """A hash chain over steps, so that a resumed run continues it."""

    def __init__(self, value: str = ""):
        self.value = value

    def add_step(
        self, groups: Iterable[SampleGroup], loss: float, weights: str, *, with_spans: bool = False
    ) -> None:
        """Add a step's samples, their rewards, its loss, and the weights after it. `with_spans`:
        also add the version of the weights that each token was sampled from."""
        digest = hashlib.sha256(self.value.encode())
        episodes = [episode for group in groups for episode in group.episodes]
        for number, sample in (pair for episode in episodes for pair in enumerate(episode)):
            trajectory, length = sample.trajectory, sample.trajectory.num_sampled
            digest.update(trajectory.response_ids.array.astype("<i8").tobytes())
            digest.update(trajectory.rollout_log_probs.array.tobytes())
            digest.update(struct.pack("<d", sample.reward))
            if number:
                digest.update(b"the same episode")
            if sample.token_rewards is not None:
                digest.update(struct.pack(f"<{length}d", *sample.token_rewards))
            for term, each in sorted(sample.token_weights.items()):
                digest.update(f"weights of {term}".encode() + struct.pack(f"<{length}d", *each))
            for span in trajectory.spans if with_spans else ():
                digest.update(f"{span.version}:{span.start}-{span.end};".encode())
        digest.update(struct.pack("<d", loss))
        digest.update(weights.encode())
        self.value = digest.hexdigest()[:32]
