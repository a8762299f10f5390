"""Evaluation, and what a run writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fallback_correction.ranges import Rule, at_least
from onpolicy.config.kinds import SMALLEST_TEMPERATURE, Count, CountOrZero, Directory

NOT_NEARLY_GREEDY = Rule(
    lambda x: not 0 < x < SMALLEST_TEMPERATURE,
    f"SGLang samples greedily below {SMALLEST_TEMPERATURE:g}. Give 0, or a larger value.",
)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    eval_interval: CountOrZero = 0
    """Evaluate before the first and after every so many rollouts; 0: never."""

    eval_prompt_data: tuple[str, ...] = ()
    """Evaluation prompts, read like --prompt-data: a path, or several sets as name path name path."""

    n_samples_per_eval_prompt: Count = 1
    """Responses per evaluation prompt: avg@k and pass@k."""

    eval_temperature: Annotated[float, at_least(0), NOT_NEARLY_GREEDY] = 1.0
    """Temperature of evaluation samples; 0 is greedy."""

    eval_max_response_len: Annotated[int | None, at_least(1)] = None
    """Longest evaluation response; --rollout-max-response-len if not given."""


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    run_dir: Directory = "runs/train"
    """Directory for configuration, logs, metrics, plots; made if it is not there."""

    save: str = ""
    """Directory for checkpoints."""

    save_interval: CountOrZero = 0
    """Save after every so many rollouts, and after the last; 0: never."""

    keep_checkpoints: CountOrZero = 0
    """Keep the newest so many, deleting an older one when a new one is complete; 0: all."""

    load: str = ""
    """Resume from this directory of checkpoints, at its latest one, or from this checkpoint. The
    same directory as --save may be empty yet: a run that is started again goes on."""

    max_rank_restarts: CountOrZero = 0
    """Losses of a rank of the trainer, or of a host of the cluster, after which the run goes on by
    itself from its last checkpoint, on the hosts that are left; at the next one it ends. Engines that
    die on a host that lives are started again there, up to --rollout-max-restarts times."""

    allow_changed_settings: tuple[str, ...] = ()
    """Settings, by their names in config.json, that may be others than the resumed checkpoint's."""

    use_tensorboard: bool = False
    """Also write TensorBoard files into the run directory."""

    use_wandb: bool = False
    """Also log to Weights & Biases (set WANDB_MODE=offline for no network)."""

    wandb_required: bool = False
    """End a run that Weights & Biases fails; else it is said once, and the run goes on without it."""

    wandb_project: str = "onpolicy"
    """Project name there."""

    wandb_group: str = ""
    """Group of the run there."""

    wandb_run_name: str = ""
    """Name of the run there; one is made up if not given. A resumed run continues its run there."""

    log_samples: CountOrZero = 16
    """Samples of a rollout, and of every evaluation set, to write into the run directory; 0: none."""

    log_samples_interval: Count = 1
    """Write them after every so many rollouts, and of every evaluation."""

    def case_file(self, step: int) -> str:
        """Where a sample of rollout `step` is kept whose parity check failed."""
        return f"{self.run_dir}/cases/rollout_{step:06d}.json"
