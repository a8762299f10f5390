"""The flags of a run's outputs."""

import difflib
from dataclasses import dataclass
from typing import Annotated

from fallback_correction.ranges import ReadBy
from onpolicy.config.kinds import CountOrZero, Directory
from onpolicy.config.rules import Facts, Together

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
    """Directory for the configuration, logs, metrics and samples. A new one gets mode 0700; an existing
    one keeps its mode."""

    group_can_read: bool = False
    """Let the directory's group read --run-dir and --save (mode 0750), where people share a project."""

    save: str = ""
    """Directory for checkpoints. By default none are saved."""

    save_interval: Annotated[
        CountOrZero,
        Together(lambda run: bool(run.save_interval) != bool(run.save),
            "--save-interval={run.save_interval}, --save={run.save!r}: " + NO_USE_ALONE),
    ] = 0  # fmt: skip
    """Save a checkpoint after every this many rollouts, and after the last. 0 saves none."""

    keep_checkpoints: Annotated[CountOrZero, ReadBy("--save", lambda run: run.save)] = 0
    """Number of newest checkpoints to keep. An older one is deleted once a new one is complete. 0 keeps
    all."""

    save_best_metric: Annotated[str, ReadBy("--save", lambda run: run.save)] = ""
    """Evaluation metric, such as eval/aime/avg@8, whose best checkpoint is kept too. The largest value
    is the best, the first one among equals; `best` in --save links to it."""

    load: str = ""
    """Checkpoint to resume from, or a directory of checkpoints, of which the latest is taken. If it is
    the same directory as --save it may be empty, so that a restarted run resumes."""

    max_rank_restarts: Annotated[
        CountOrZero, ReadBy("--save and --save-interval", lambda run: run.save_interval)
    ] = 0
    """Number of times that the run resumes from its last checkpoint by itself after it lost a trainer
    rank or a host. It uses the hosts that are left. Dead engines on living hosts are restarted
    separately, up to --rollout-max-restarts times."""

    allow_changed_settings: Annotated[
        tuple[str, ...],
        ReadBy("--load or --replay", lambda run: run.load or run.replay),
        Together(_unknown_setting, "--allow-changed-settings={found}"),
    ] = ()
    """Names of settings, as in config.json, that may differ from those of the resumed checkpoint."""

    use_tensorboard: bool = False
    """Also write TensorBoard files into the run directory."""

    use_wandb: bool = False
    """Also log to Weights & Biases. The environment variables WANDB_PROJECT (default: onpolicy),
    WANDB_NAME and WANDB_RUN_GROUP name the run; WANDB_MODE=offline needs no network."""

    use_trackio: bool = False
    """Also log to trackio, into the run directory unless TRACKIO_DIR names another. TRACKIO_PROJECT
    (default: onpolicy) names the project."""

    use_mlflow: bool = False
    """Also log to MLflow, into the run directory unless MLFLOW_TRACKING_URI names a server.
    MLFLOW_EXPERIMENT_NAME (default: onpolicy) names the experiment."""

    use_swanlab: bool = False
    """Also log to SwanLab, into the run directory for `swanlab sync` unless SWANLAB_MODE=online.
    SWANLAB_PROJ_NAME (default: onpolicy) names the project."""

    log_samples: CountOrZero = 16
    """Number of samples to write into the run directory for each rollout and each evaluation set. 0
    writes none."""

    def case_file(self, step: int) -> str:
        """Return the file for a sample of rollout `step` whose parity check failed."""
        return f"{self.run_dir}/cases/rollout_{step:06d}.json"
