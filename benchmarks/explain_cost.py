"""Cost of recording: a server's sampling and a trainer's scoring, with taps and without, in turns.

    python -m benchmarks.explain_cost --layers 4 --hidden 256

Prints one line of JSON: seconds of each (medians), and the ratios.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.bench.turns import seconds, take_turns
from onpolicy.explain.explain_inputs import TAPS
from onpolicy.explain.microscope import Microscope
from onpolicy.explain.taps.recorder import Recorder
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.engine_specs import make_rollout_group
from tests.support.engines_fixture import make_engines, make_requests, running
from tests.support.tiny import make_checkpoint


def sample(pair: EnginePair, requests: list) -> None:  # type: ignore[type-arg]
    for client in pair.rollout.clients:  # type: ignore[union-attr]
        client.flush_cache()
    pair.generate(requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"layers": 4, "hidden": 256, "requests": 8, "tokens": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    sizes = {
        "hidden_size": args.hidden, "intermediate_size": 3 * args.hidden,
        "num_hidden_layers": args.layers,
    }  # fmt: skip
    requests = make_requests(args.requests, seed=1, max_new_tokens=args.tokens)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = make_checkpoint(root / "model", "qwen3", **sizes)
        (root / "taps").mkdir()
        tapped = partial(make_rollout_group, extensions={TAPS: str(root / "taps")})
        plain = stack.enter_context(running(make_engines(path, root / "plain"), anew=True))
        pair = make_engines(path, root / "tapped", make_rollout=tapped)
        recorded = stack.enter_context(running(pair, anew=True))
        microscope = Microscope(recorded, root / "taps", requests, 1.0)
        completions = plain.generate(requests)
        sequences = [
            [*r.prompt_ids, *c.response_ids] for r, c in zip(requests, completions, strict=True)
        ]
        prompts = [len(r.prompt_ids) for r in requests]
        works: dict[str, Callable[[], object]] = {
            "sample": lambda: sample(plain, requests),
            "sample_recorded": microscope.sample,
            "score": lambda: plain.trainer.log_probs(sequences, prompts, 1.0),
            "score_recorded": lambda: microscope.score(completions, Recorder()),
        }
        measures = {name: partial(seconds, work) for name, work in works.items()}
        times = take_turns(measures, 1, args.repetitions)
    result = {name: median(values) for name, values in times.items()}
    for name in ("sample", "score"):
        result[f"{name}_ratio"] = result[f"{name}_recorded"] / result[name]
    print(json.dumps({**vars(args), **result}))


if __name__ == "__main__":
    main()
