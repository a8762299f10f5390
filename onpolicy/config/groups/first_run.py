"""The flags of a first run, which `--help` shows."""

from collections.abc import Mapping

FIRST: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "onpolicy train": {
        "What is trained, on what": (
            "hf_checkpoint", "prompt_data", "input_key", "label_key", "apply_chat_template",
        ),
        "What a response is worth": ("rm_type", "custom_rm_path", "rewards"),
        "Rollouts": (
            "num_rollout", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len",
            "rollout_temperature",
        ),
        "Both engines agree, or the rollout is corrected": ("true_on_policy_mode", "use_tis"),
        "Algorithm": (
            "recipe", "advantage_estimator", "eps_clip", "eps_clip_high", "use_kl_loss",
            "kl_loss_coef", "dynamic_sampling",
        ),
        "Optimizer and memory": (
            "lr", "lr_warmup_steps", "global_batch_size", "max_tokens_per_gpu",
            "activation_checkpointing", "lora_rank",
        ),
        "GPUs": ("actor_num_gpus_per_node", "rollout_num_engines", "colocate", "rollout_lag"),
        "Evaluation": ("eval_prompt_data", "eval_interval", "n_samples_per_eval_prompt"),
        "Outputs": ("run_dir", "save", "save_interval", "load", "use_wandb"),
        "The run": ("seed", "custom_config_path", "dry_run"),
    },
}  # fmt: skip
"""The flags that a first run needs, in the order in which one meets them, by command."""
