"""The command `onpolicy train`."""

import json
from collections.abc import Sequence

from onpolicy.cli.command import begin
from onpolicy.compat.light_imports import import_transformers
from onpolicy.config import TrainConfig
from onpolicy.config.groups.algorithm_flags import recipe_of


def main(argv: Sequence[str]) -> int:
    """Parse, check everything that can be checked, then train."""
    config = begin(TrainConfig, argv, "onpolicy train")
    return _dry_run(config) if config.dry_run else _train(config)


def _dry_run(config: TrainConfig) -> int:
    import_transformers()
    from onpolicy.rewards.scorer import Scorer
    from onpolicy.run import saving
    from onpolicy.run.launch.cluster_engines import planned
    from onpolicy.run.launch.input_checks import fit_run, sharing_described
    from onpolicy.run.launch.inputs import read_inputs

    config = fit_run(config)
    inputs = read_inputs(config, Scorer(config.reward))
    saving.find(config, inputs.prompts.prompts, inputs.evaluations)
    if config.output.save:
        saving.require_room(config, inputs.hf_config, inputs.contract.adapter)
    print(json.dumps(config.to_dict(), indent=2))
    _say_what_runs(config)
    print(sharing_described(config, [len(p.prompt_ids) for p in inputs.prompts.prompts]))
    contract, longest = inputs.contract, inputs.longest_sequence(config)
    print("\n".join(planned(config, inputs.hf_config, contract, longest)))
    print(f"{len(inputs.prompts.prompts)} prompts; contract {contract.fingerprint}")
    return 0


def _train(config: TrainConfig) -> int:
    from onpolicy.api import run_configured
    from onpolicy.outputs.progress import print_summary

    print_summary(run_configured(config, announce=_say_what_runs))
    return 0


def _say_what_runs(config: TrainConfig) -> None:
    """Print the flags that a recipe set, if one was named, and how a rollout becomes optimizer steps."""
    lines = recipe_of(config.to_dict()), config.batch_equation()
    print(*filter(None, lines), sep="\n", flush=True)
