"""Growth of the gain from shared prefixes with a group's responses and its prompt, beside the limit.

    python -m benchmarks.shared_prefixes_growth [--repetitions 3] [--json FILE] [--image FILE]

It takes the steps of `benchmarks.shared_prefixes`, with and without in turns, over one group each, of
responses of 128 tokens. Feed-forwards are as wide as the hidden size, 1,024, and there is one layer:
the largest group then takes less than 4 GiB. `--from FILE` draws a record again and measures nothing.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import os
import resource
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from onpolicy.compat.process import prepare_process

prepare_process()  # before torch is imported

from benchmarks.shared_prefixes import compare, group, make_model
from onpolicy.cli.command import put_out
from onpolicy.outputs.directory import versions

RESPONSE = 128
WIDTH = 1024
"""The width of a feed-forward layer."""

BY_SAMPLES = [(512, n) for n in (2, 4, 8, 16)]
BY_PROMPT = [(prompt, 8) for prompt in (64, 256, 512, 1024, 1536)]
"""(prompt tokens, responses)"""

LINES = {"limit": "tokens / distinct tokens", "processor": "processor time", "speed": "wall clock"}


def measure(layers: int, prompt: int, n: int, repetitions: int) -> dict[str, Any]:
    """Measure a case, with the machine's load before it and the process's peak memory."""
    load = os.getloadavg()[0]
    compared = compare(make_model(layers, WIDTH), *group(prompt, RESPONSE, n), repetitions)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"prompt": prompt, "n": n, "load": load, "peak_bytes": peak, **compared}


def measure_all(layers: int, repetitions: int) -> list[dict[str, Any]]:
    """Measure each case in a process of its own, whose buffers have its sizes alone."""
    found = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for prompt, n in dict.fromkeys([*BY_SAMPLES, *BY_PROMPT]):
            found.append(pool.submit(measure, layers, prompt, n, repetitions).result())
            print(found[-1], flush=True)
    return found


def draw(cases: Sequence[Mapping[str, Any]], image: Path) -> None:
    """Draw a PNG with the gain of steps and its limit, by responses and by the prompt's length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by = {(case["prompt"], case["n"]): case for case in cases}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.4), sharey=True)
    panels = (
        (BY_SAMPLES, 1, "responses to a prompt of 512"),
        (BY_PROMPT, 0, "prompt of 8 responses"),
    )
    for axis, (points, which, name) in zip(axes, panels, strict=True):
        for key, label in LINES.items():
            style = "k--" if key == "limit" else "o-"
            axis.plot([p[which] for p in points], [by[p][key] for p in points], style, label=label)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks([p[which] for p in points], [f"{p[which]:,}" for p in points])
        axis.set_xlabel(name)
        axis.tick_params(axis="x", labelsize="small")
        axis.grid(alpha=0.3)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("whole sequences / shared prefixes")
    axes[0].legend(fontsize="small", loc="upper left")
    figure.tight_layout()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", default="")
    parser.add_argument("--image", default="")
    parser.add_argument("--from", default="", dest="record", help="a record to draw")
    args = parser.parse_args()
    if args.record:
        cases = json.loads(Path(args.record).read_text())["cases"]
    else:
        cases = measure_all(args.layers, args.repetitions)
        record = {
            "layers": args.layers,
            "feed_forward": WIDTH,
            "response": RESPONSE,
            "cases": cases,
        }
        put_out({**record, "versions": versions()}, args.json)
    if args.image:
        draw(cases, Path(args.image))


if __name__ == "__main__":
    main()
