"""How often does the policy invest? From the samples of a run, a row for every few rollouts.

python examples/mid_episode_rewards/choices.py runs/mid_episode_rewards/gae
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

ROLLOUTS = 5


def invested(run: Path) -> list[float]:
    """The share of episodes that begin with investing, of each ROLLOUTS rollouts."""
    files = sorted((run / "samples").glob("rollout_*.jsonl"))
    parts = [files[i : i + ROLLOUTS] for i in range(0, len(files), ROLLOUTS)]
    return [
        fmean(json.loads(line)["response"].startswith("i") for f in part for line in f.open())
        for part in parts
    ]


if __name__ == "__main__":
    for part, share in enumerate(invested(Path(sys.argv[1]))):
        first = part * ROLLOUTS
        print(f"rollouts {first:2}-{first + ROLLOUTS - 1:2}: {share:.2f} invested")
