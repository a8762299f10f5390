"""`onpolicy bench rollout | step`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from onpolicy.config import parse
from onpolicy.config.tools import BenchConfig
from onpolicy.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Measure, and print or write the JSON."""
    config = parse(BenchConfig, argv, "onpolicy bench")
    _require_sides(config)

    from onpolicy.bench import bench_rollout, bench_step, check_layouts
    from onpolicy.train import distributed

    logging.disable(logging.WARNING)  # mismatches of the stock operators are no news here
    check_layouts(config)
    distributed.init_process_group()
    result = bench_rollout(config) if config.what == "rollout" else bench_step(config)
    text = json.dumps(result, indent=2)
    print(text)
    if config.json:
        Path(config.json).write_text(text + "\n")
    return 0


def _require_sides(config: BenchConfig) -> None:
    backends = config.train_backend
    if len(set(backends)) != len(backends) or len(backends) not in (1, 2):
        raise ConfigError(
            f"--train-backend={' '.join(backends)}: must be one engine, or two different ones to "
            "compare. Give fsdp, megatron, or both."
        )
