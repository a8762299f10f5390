"""The command `onpolicy sft`."""

import json
from collections.abc import Sequence

from onpolicy.cli.command import begin
from onpolicy.config.sft_flags import SftConfig


def main(argv: Sequence[str]) -> int:
    """Parse, check everything that can be checked, then learn."""
    config = begin(SftConfig, argv, "onpolicy sft")

    from onpolicy.run import saving
    from onpolicy.run.supervised.supervised_run import fine_tune, read_inputs

    inputs = read_inputs(config)
    rows, steps = len(inputs.examples), inputs.num_steps
    equation = (
        f"{rows} rows; {steps} optimizer steps x global_batch_size "
        f"{config.trainer.global_batch_size}; contract {inputs.contract.fingerprint}"
    )
    if config.dry_run:
        saving.find(config, [example.prompt for example in inputs.examples], inputs.evaluations)
        if config.output.save:
            saving.require_room(config, inputs.hf_config)
        print(json.dumps(config.to_dict(), indent=2), equation, sep="\n")
        return 0
    print(equation, flush=True)
    summary = fine_tune(config, inputs)
    print(f"{summary.steps} steps, loss {summary.loss:.4f}, run hash {summary.run_hash}")
    return 0
