"""Memory and traffic of the process that holds the loop, for growing numbers of long samples.

    python -m benchmarks.controller_memory OUT.json [NUM_SAMPLES ...]

The engines' answers are made up and then handled as in a run: read as the client reads them, cut into
the shares of two ranks, and sent to two actors of a Ray session of the run's own. Each number of
samples is measured in a process of its own.
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


def answer_of_an_engine(count: int = RESPONSE) -> dict[str, Any]:
    """Return made-up tokens as the plug-in answers them."""
    from sglang_patches.generate_each import _packed

    rng = random.Random(0)
    ids = [rng.randrange(VOCABULARY) for _ in range(count)]
    meta = {
        "output_token_logprobs": [(-rng.random(), token, None) for token in ids],
        "finish_reason": {"type": "length"},
        "weight_version": 0,
    }
    return _packed({"output_ids": ids, "meta_info": meta})


def measure(num_samples: int) -> dict[str, float]:
    import psutil

    from onpolicy.cluster.ray_session import session
    from onpolicy.config.groups import ClusterConfig
    from onpolicy.rollout.client import completion_of
    from onpolicy.train.shares import Steps, make_shares
    from onpolicy.trajectory import Trajectory
    from onpolicy.types import Prompt, Request, Sample, SamplingParams

    with session(ClusterConfig()):
        import ray
        from ray.cloudpickle import dumps

        class Rank:
            def take(self, share: Steps) -> int:
                parts = [part for step in share for part in step]
                return sum(len(s.trajectory.token_ids) for part in parts for s in part.values())

        ranks = [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(RANKS)]
        ray.get([rank.take.remote(make_shares([], 1, 1, 1)[0]) for rank in ranks])
        process, answer = psutil.Process(), json.dumps(answer_of_an_engine())
        before = process.memory_info().rss
        prompt = Prompt(index=0, prompt_ids=list(range(PROMPT)), label="", text="")
        params = SamplingParams(temperature=1.0, max_new_tokens=RESPONSE, stop_token_ids=())
        request = Request(prompt_ids=prompt.prompt_ids, sampling_seed=0, params=params)
        samples = [
            Sample(
                prompt=prompt,
                sample_index=i,
                trajectory=Trajectory.begin(prompt.prompt_ids).plus(
                    completion_of(json.loads(answer), 200, request, ""), 1.0
                ),
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
