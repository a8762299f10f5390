"""Memory and traffic of the process that holds the loop, for growing numbers of long samples.

    python -m benchmarks.controller_memory OUT.json [NUM_SAMPLES ...]

The engines' answers are made up and then handled as in a run: parsed from JSON, cut into the
shares of two ranks, and sent to two actors of a Ray session of the run's own. Each number of samples is
measured in a process of its own.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

RESPONSE, PROMPT, VOCABULARY = 8192, 64, 151_936
RANKS = 2
SIZES = (1250, 2500, 5000, 10_000)


def answer_of_an_engine() -> str:
    rng = random.Random(0)
    return json.dumps(
        {
            "ids": [rng.randrange(VOCABULARY) for _ in range(RESPONSE)],
            "log_probs": [-rng.random() for _ in range(RESPONSE)],
        }
    )


def completion_of(answer: str) -> Any:
    """Return a completion with its own tokens and numbers, parsed as by the client."""
    from onpolicy.trajectory import Completion, FinishReason

    read = json.loads(answer)
    return Completion(
        response_ids=read["ids"],
        rollout_log_probs=read["log_probs"],
        finish_reason=FinishReason.LENGTH,
        weight_version=0,
        num_cached_tokens=0,
    )


def measure(num_samples: int) -> dict[str, float]:
    import psutil

    from onpolicy.cluster.ray_session import session
    from onpolicy.config.groups import ClusterConfig
    from onpolicy.train.shares import Steps, make_shares
    from onpolicy.trajectory import Trajectory
    from onpolicy.types import Prompt, Sample

    with session(ClusterConfig()):
        import ray
        from ray.cloudpickle import dumps

        class Rank:
            def take(self, share: Steps) -> int:
                parts = [part for step in share for part in step]
                return sum(len(s.token_ids) for part in parts for s in part.values())

        ranks = [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(RANKS)]
        ray.get([rank.take.remote(make_shares([], 1, 1, 1)[0]) for rank in ranks])
        process, answer = psutil.Process(), answer_of_an_engine()
        before = process.memory_info().rss
        prompt = Prompt(index=0, prompt_ids=list(range(PROMPT)), label="", text="")
        samples = [
            Sample(
                prompt=prompt,
                sample_index=i,
                trajectory=Trajectory.begin(prompt.prompt_ids).plus(completion_of(answer), 1.0),
                group=0,
                episode=i,
            )
            for i in range(num_samples)
        ]
        held = process.memory_info().rss
        shares = make_shares(samples, 1, RANKS, 4 * (PROMPT + RESPONSE))
        sent = sum(len(dumps(share)) for share in shares)
        taken = ray.get(
            [rank.take.remote(share) for rank, share in zip(ranks, shares, strict=True)]
        )
        assert sum(taken) == num_samples * (PROMPT + RESPONSE)
        peak = max(process.memory_info().rss, held)
    return {
        "num_samples": num_samples,
        "held_kib_per_sample": (held - before) / num_samples / 1024,
        "sent_kib_per_sample": sent / num_samples / 1024,
        "after_sending_mib": peak / 2**20,
    }


def main() -> None:
    out, *sizes = sys.argv[1:]
    if out == "--one":
        print(json.dumps(measure(int(sizes[0]))))
        return
    rows = []
    for size in [int(size) for size in sizes] or SIZES:
        command = [sys.executable, "-m", "benchmarks.controller_memory", "--one", str(size)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    record = {"response_tokens": RESPONSE, "prompt_tokens": PROMPT, "ranks": RANKS, "rows": rows}
    Path(out).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
