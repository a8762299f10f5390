"""The flags of a run's outputs."""

import difflib
from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import ReadBy
from onpolicy.config.kinds import Count, CountOrZero, Directory
from onpolicy.config.rules import Facts, Together

BY_WANDB = ReadBy("--use-wandb", lambda run: run.use_wandb)
NO_USE_ALONE = "the one does nothing without the other. Give both, or neither."


def _unknown_setting(run: Facts) -> str | None:
    """Return the message about the first unknown name in --allow-changed-settings, with a hint."""
    known = run.config.to_dict()
    for name in run.allow_changed_settings:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {nearest[0]}?" if nearest else "Take the names from config.json."
            return f"{name}: no setting has that name. {hint}"
    return None


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    run_dir: Directory = "runs/train"
    """Directory for configuration, logs, metrics, plots; made if it is not there, for you alone."""

    group_can_read: bool = False
    """Let the group of the run and checkpoint directories look into them, as it is meant where several
    people share a project; others never can. Without it a directory that was there keeps its mode."""

    save: str = ""
    """Directory for checkpoints."""

    save_interval: Annotated[
        CountOrZero,
        Together(lambda run: bool(run.save_interval) != bool(run.save),
            "--save-interval={run.save_interval}, --save={run.save!r}: " + NO_USE_ALONE),
    ] = 0  # fmt: skip
    """Save after every so many rollouts, and after the last; 0: never."""

    keep_checkpoints: Annotated[CountOrZero, ReadBy("--save", lambda run: run.save)] = 0
    """Keep the newest so many, deleting an older one when a new one is complete; 0: all."""

    save_best_metric: Annotated[str, ReadBy("--save", lambda run: run.save)] = ""
    """Also keep the checkpoint with the best value of this evaluation metric, such as eval/aime/avg@8;
    `best` under --save is a link to it. Later ones that are equal are not better."""

    save_best_mode: Annotated[
        Literal["max", "min"], ReadBy("--save-best-metric", lambda run: run.save_best_metric)
    ] = "max"
    """Whether the largest value is the best, or the smallest."""

    load: str = ""
    """Resume from this directory of checkpoints, at its latest one, or from this checkpoint. The
    same directory as --save may be empty yet: a run that is started again goes on."""

    max_rank_restarts: Annotated[
        CountOrZero, ReadBy("--save and --save-interval", lambda run: run.save_interval)
    ] = 0
    """Losses of a rank of the trainer, or of a host of the cluster, after which the run goes on by
    itself from its last checkpoint, on the hosts that are left; at the next one it ends. Engines that
    die on a host that lives are started again there, up to --rollout-max-restarts times."""

    allow_changed_settings: Annotated[
        tuple[str, ...],
        ReadBy("--load or --replay", lambda run: run.load or run.replay),
        Together(_unknown_setting, "--allow-changed-settings={found}"),
    ] = ()
    """Settings, by their names in config.json, that may be others than the resumed checkpoint's."""

    use_tensorboard: bool = False
    """Also write TensorBoard files into the run directory."""

    use_wandb: bool = False
    """Also log to Weights & Biases (set WANDB_MODE=offline for no network)."""

    wandb_required: Annotated[bool, BY_WANDB] = False
    """End a run that Weights & Biases fails; else it is said once, and the run goes on without it."""

    wandb_project: Annotated[str, BY_WANDB] = "onpolicy"
    """Project name there."""

    wandb_group: Annotated[str, BY_WANDB] = ""
    """Group of the run there."""

    wandb_run_name: Annotated[str, BY_WANDB] = ""
    """Name of the run there; one is made up if not given. A resumed run continues its run there."""

    log_samples: CountOrZero = 16
    """Samples of a rollout, and of every evaluation set, to write into the run directory; 0: none."""

    log_samples_interval: Count = 1
    """Write them after every so many rollouts, and of every evaluation."""

    def case_file(self, step: int) -> str:
        """Return the file for a sample of rollout `step` whose parity check failed."""
        return f"{self.run_dir}/cases/rollout_{step:06d}.json"
