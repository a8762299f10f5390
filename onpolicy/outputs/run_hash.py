"""Hash of a whole run: equal hashes mean equal samples, rewards, losses and weights."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from onpolicy.types import SampleGroup


class RunHash:
    """A hash chain over steps, so that a resumed run continues it."""

    def __init__(self, value: str = ""):
        self.value = value

    def add_step(
        self, groups: Iterable[SampleGroup], loss: float, weights: str, *, with_spans: bool = False
    ) -> None:
        """Add a step's samples, their rewards, its loss, and the weights after it.

        `with_spans`: also add the version of the weights that each token was sampled from.
        """
        digest = hashlib.sha256(self.value.encode())
        groups = [*groups]
        episodes = [episode for group in groups for episode in group.episodes]
        episodes += [[group.greedy] for group in groups if group.greedy]
        for number, sample in (pair for episode in episodes for pair in enumerate(episode)):
            trajectory, length = sample.trajectory, sample.trajectory.num_sampled
            digest.update(struct.pack(f"<{length}q", *trajectory.response_ids))
            digest.update(struct.pack(f"<{length}f", *trajectory.rollout_log_probs))
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
