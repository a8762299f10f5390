"""`onpolicy verify`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from onpolicy.config import parse, sglang_flags
from onpolicy.config.tools import VerifyConfig
from onpolicy.config.train import require_mode_for_operators
from onpolicy.outputs.console import configure_logging

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Measure, print the report, and say by the exit code whether the mode's promise holds."""
    config = parse(VerifyConfig, argv, "onpolicy verify")
    sglang_flags.validate(config.sglang_args, aligned=config.true_on_policy_mode)
    require_mode_for_operators(config.operators, aligned=config.true_on_policy_mode)

    configure_logging()
    logger.info("loading PyTorch and transformers")

    from onpolicy.start import check_layout
    from onpolicy.train import distributed
    from onpolicy.verify import make_train_config, passes, verify

    check_layout(make_train_config(config))
    distributed.init_process_group()
    report = verify(config)
    if distributed.rank() == 0:
        text = json.dumps(report, indent=2)
        print(text)
        if config.json:
            Path(config.json).write_text(text + "\n")
    return 0 if passes(report, config) else 1
