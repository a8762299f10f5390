"""The flags' names in other libraries: TRL's GRPOConfig, verl's overrides, prime-rl's and OpenRLHF's
flags.

Names of slime and Miles are our own. Only names with the same meaning are listed; values may have other
units.
"""

from __future__ import annotations

import re

OURS = {
    # TRL
    "num_generations": "n_samples_per_prompt",
    "max_completion_length": "rollout_max_response_len",
    "model_name_or_path": "hf_checkpoint",
    "dataset_name": "prompt_data",
    "reward_funcs": "custom_rm_path",
    "learning_rate": "lr",
    "beta": "kl_loss_coef",
    "epsilon": "eps_clip",
    "epsilon_high": "eps_clip_high",
    "temperature": "rollout_temperature",
    "max_grad_norm": "clip_grad",
    "output_dir": "run_dir",
    "save_steps": "save_interval",
    "resume_from_checkpoint": "load",
    "warmup_steps": "lr_warmup_steps",
    "lr_scheduler_type": "lr_decay_style",
    # OpenRLHF
    "pretrain": "hf_checkpoint",
    "actor_learning_rate": "lr",
    "init_kl_coef": "kl_coef",
    "generate_max_len": "rollout_max_response_len",
    "ckpt_path": "save",
    # verl, without the groups before the last names
    "model.path": "hf_checkpoint",
    "rollout.n": "n_samples_per_prompt",
    "rollout.temperature": "rollout_temperature",
    "optim.lr": "lr",
    "train_files": "prompt_data",
    "val_files": "eval_prompt_data",
    "train_batch_size": "rollout_batch_size",
    "ppo_mini_batch_size": "global_batch_size",
    "max_response_length": "rollout_max_response_len",
    "adv_estimator": "advantage_estimator",
    "clip_ratio": "eps_clip",
    "clip_ratio_high": "eps_clip_high",
    "custom_reward_function.path": "custom_rm_path",
    "default_local_dir": "save",
    "save_freq": "save_interval",
}
"""The names of our flags by other libraries' names, with underscores."""

_OVERRIDE = re.compile(
    r"\+{0,2}((?:actor_rollout_ref|algorithm|critic|custom_reward_function|data|reward_model|trainer)"
    r"(?:\.\w+)+)=.*",
    re.DOTALL,
)


def ours_for(name: str) -> str | None:
    """Return our flag's name for another library's name or a verl path, or None if it is unknown."""
    parts = name.lstrip("-").replace("-", "_").split(".")
    return OURS.get(".".join(parts[-2:])) or OURS.get(parts[-1])


def override_in(argument: str) -> str | None:
    """Return the path that an argument sets if it is a verl override (`path=value`), else None."""
    match = _OVERRIDE.fullmatch(argument)
    return match[1] if match else None
