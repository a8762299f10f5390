"""`onpolicy train`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence

from onpolicy.config import TrainConfig, parse, validate
from onpolicy.outputs.console import configure_logging

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Parse, check everything that can be checked, then train."""
    config = parse(TrainConfig, argv, "onpolicy train")
    validate(config)
    return _dry_run(config) if config.dry_run else _train(config)


def _dry_run(config: TrainConfig) -> int:
    from onpolicy.rewards.scorer import Scorer
    from onpolicy.start import check_layout, read_inputs

    if os.environ.get("RANK", "0") != "0":  # torchrun: one answer is enough
        return 0
    check_layout(config)
    inputs = read_inputs(config, Scorer(config.reward))
    print(json.dumps(config.to_dict(), indent=2))
    print(config.batch_equation())
    print(f"{len(inputs.prompts.prompts)} prompts; contract {inputs.ladder.contract.fingerprint}")
    return 0


def _train(config: TrainConfig) -> int:
    configure_logging()
    logger.info("loading PyTorch and transformers")

    from onpolicy.loop import train
    from onpolicy.outputs.progress import print_summary
    from onpolicy.rewards.scorer import Scorer
    from onpolicy.start import check_layout, read_inputs
    from onpolicy.train import distributed

    check_layout(config)
    distributed.init_process_group()
    inputs = distributed.run_on_rank_zero(lambda: read_inputs(config, Scorer(config.reward)))
    if distributed.rank() == 0:
        print(config.batch_equation(), flush=True)
    summary = train(config, inputs)
    if distributed.rank() == 0:
        print_summary(summary)
    return 0
