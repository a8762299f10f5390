"""The command `onpolicy bench rollout | decode | agents | step | loop`."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from onpolicy.cli.command import begin, put_out
from onpolicy.config.tool_flags import BenchConfig


def main(argv: Sequence[str]) -> int:
    """Measure, and print or write the JSON."""
    config = begin(BenchConfig, argv, "onpolicy bench")

    from onpolicy.bench.agents import bench_agents
    from onpolicy.bench.decode import bench_decode
    from onpolicy.bench.input_checks import check_inputs
    from onpolicy.bench.loop import bench_loop
    from onpolicy.bench.rollout import bench_rollout
    from onpolicy.bench.schedules import bench_schedules
    from onpolicy.bench.step import bench_step

    config = check_inputs(config)
    benches = {
        "rollout": bench_rollout,
        "decode": bench_decode,
        "agents": bench_agents,
        "step": bench_step,
        "loop": bench_loop if config.longest_response is None else bench_schedules,
    }
    with _quiet():
        put_out(benches[config.what](config), config.json)
    return 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Let only benchmarks log: mismatches of the stock operators are expected here."""
    levels = {"": logging.ERROR, "onpolicy": logging.ERROR, "onpolicy.bench": logging.INFO}
    before = {name: logging.getLogger(name).level for name in levels}
    try:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
