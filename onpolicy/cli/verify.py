"""`onpolicy verify`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from onpolicy.cli.parse import parse
from onpolicy.config import sglang_flags
from onpolicy.config.ranges import require_ranges
from onpolicy.config.tools import VerifyConfig
from onpolicy.config.train import require_mode_for_operators
from onpolicy.config.unread import refuse_unread
from onpolicy.outputs.console import configure_logging
from onpolicy.outputs.places import require_directory, require_writable, write_output
from onpolicy.system.ranks import is_first_rank

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Measure, print the report, and say by the exit code whether the mode's promise holds."""
    config = parse(VerifyConfig, argv, "onpolicy verify")
    require_ranges(config)
    sglang_flags.validate(config.sglang_args, aligned=config.true_on_policy_mode)
    require_mode_for_operators(config.operators.operators, aligned=config.true_on_policy_mode)
    refuse_unread(config)
    require_directory("--run-dir", config.run_dir)
    if config.json:
        require_writable("--json", config.json)

    configure_logging()
    logger.info("loading PyTorch and transformers")

    from onpolicy.run.verify import check_inputs, passes, verify
    from onpolicy.train import distributed

    if is_first_rank():
        check_inputs(config)
    distributed.init_process_group()
    report = verify(config)
    if distributed.rank() == 0:
        text = json.dumps(report, indent=2)
        print(text)
        if config.json:
            write_output("--json", config.json, text + "\n")
    return 0 if passes(report, config) else 1
