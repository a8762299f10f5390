"""The typed configuration of a training run."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import tyro

from onpolicy.algorithm.catalogue import OBJECTIVES
from onpolicy.config import groups, secrets
from onpolicy.config.flags import SGLANG_ARGS, also, flag_values
from onpolicy.config.kinds import Seed
from onpolicy.config.plan import MODE, OnMismatch, RunPlan
from onpolicy.config.rules import NO_RESULT, Against, Together
from onpolicy.config.sglang_flags import tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class SglangArgs:
    """The arguments that a command passes on to its servers."""

    sglang_args: tyro.conf.Suppress[tuple[str, ...]] = ()
    """SGLang's own flags, collected from --sglang-*."""


NO_CHECKPOINT = Together(
    lambda run: not run.hf_checkpoint, "--hf-checkpoint is missing: a run needs it. Give a path."
)


WITHOUT_WEIGHTS = [
    Against(
        lambda run: (
            run.lr_schedule == "ess"
            and not (run.use_tis or run.plan.weighs_lag or run.plan.is_governed)
        ),
        "there are no importance weights",
        "Add --use-tis, or leave it out.",
    ),
    Against(
        lambda run: run.lr_schedule == "ess" and run.custom_tis_function_path,
        "the weights of --custom-tis-function-path={found} are not known",
    ),
]


@also(
    hf_checkpoint=[NO_CHECKPOINT],
    save_best_metric=[groups.NEVER_BEST],
    lr_schedule=WITHOUT_WEIGHTS,
)
@dataclass(frozen=True, kw_only=True)
class TrainConfig(SglangArgs):
    """Train a language model by reinforcement learning, on-policy to the bit."""

    model: groups.ModelConfig = field(default_factory=groups.ModelConfig)
    data: groups.DataConfig = field(default_factory=groups.DataConfig)
    rollout: groups.RolloutConfig = field(default_factory=groups.RolloutConfig)
    engine: Annotated[groups.EngineConfig, NO_RESULT] = field(default_factory=groups.EngineConfig)
    cluster: Annotated[groups.ClusterConfig, NO_RESULT] = field(
        default_factory=groups.ClusterConfig
    )
    agent: groups.AgentConfig = field(default_factory=groups.AgentConfig)
    reward: groups.RewardConfig = field(default_factory=groups.RewardConfig)
    algorithm: groups.AlgorithmConfig = field(default_factory=groups.AlgorithmConfig)
    critic: Annotated[groups.CriticConfig, groups.BY_CRITIC] = field(
        default_factory=groups.CriticConfig
    )
    distillation: groups.DistillationConfig = field(default_factory=groups.DistillationConfig)
    fallback: groups.FallbackConfig = field(default_factory=groups.FallbackConfig)
    trainer: groups.TrainerConfig = field(default_factory=groups.TrainerConfig)
    lora: groups.LoraConfig = field(default_factory=groups.LoraConfig)
    megatron: groups.MegatronConfig = field(default_factory=groups.MegatronConfig)
    parity: groups.ParityConfig = field(default_factory=groups.ParityConfig)
    operators: groups.OperatorsConfig = field(default_factory=groups.OperatorsConfig)
    governor: groups.GovernorFlags = field(default_factory=groups.GovernorFlags)
    sync: Annotated[groups.WeightSyncConfig, NO_RESULT] = field(
        default_factory=groups.WeightSyncConfig
    )
    eval: groups.EvalConfig = field(default_factory=groups.EvalConfig)
    output: Annotated[groups.OutputConfig, NO_RESULT] = field(default_factory=groups.OutputConfig)

    seed: Seed = 0
    """Seed of the order of prompts and of all sampled tokens."""

    custom_config_path: Annotated[str, NO_RESULT] = ""
    """YAML file with values of flags (keys are the flags' names with _ for -). The command line wins."""

    dry_run: Annotated[bool, NO_RESULT] = False
    """Check everything that can be checked without running, print the resolved configuration and exit.
    Missing memory or GPUs are reported but not refused, because the run may take place elsewhere."""

    @cached_property
    def plan(self) -> RunPlan:
        """Return the properties of the run, resolved from its flags."""
        return _plan_of(self)

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def global_batch_size(self) -> int:
        """Return the number of samples per optimizer step."""
        return self.trainer.global_batch_size or self.samples_per_rollout

    @property
    def steps_per_rollout(self) -> int:
        return self.samples_per_rollout // self.global_batch_size

    @property
    def eps_clip_high(self) -> float:
        high = self.algorithm.eps_clip_high
        return self.algorithm.eps_clip if high is None else high

    @property
    def loss_aggregation(self) -> groups.LossAggregation:
        """Return the loss aggregation; by default from the objective's paper (GSPO: over sequences)."""
        own = OBJECTIVES[self.algorithm.policy_loss].aggregation
        return self.algorithm.loss_aggregation or own

    @property
    def num_likeliest(self) -> int:
        """Return the number of likeliest tokens that engines return with each sampled one."""
        return self.distillation.opd_top_k * bool(self.num_centered or self.fallback.may_bound_kl)

    @property
    def num_centered(self) -> int:
        """Return the number of them over which scores are centered; 0 without."""
        return self.distillation.opd_top_k * (self.algorithm.policy_loss == "centered")

    @property
    def loads_reference(self) -> bool:
        """Return whether the reference has weights of its own, and is not the adapters' base."""
        is_base = self.lora.lora_rank and not self.algorithm.ref_checkpoint
        return self.algorithm.reads_reference and not is_base

    @property
    def critic_checkpoint(self) -> str:
        """Return the initial checkpoint of the critic; "" without one."""
        own = self.critic.critic_load or self.model.hf_checkpoint
        return own if self.algorithm.advantage_estimator == "gae" else ""

    @property
    def open_groups(self) -> int:
        """Return the number of groups that are sampled at a time."""
        return self.rollout.over_sampling_batch_size or self.rollout.rollout_batch_size

    @cached_property
    def eval_sets(self) -> dict[str, groups.EvalSet]:
        """Return the evaluation sets by name; the name of a single path is empty."""
        return groups.sets_of(self.eval, self.rollout, self.data)

    @property
    def takes_steps(self) -> bool:
        """Return whether the trainer changes weights, or only scores."""
        return self.rollout.num_rollout > 0

    def batch_equation(self) -> str:
        """Return the four sizes of a rollout as one equation."""
        return (
            f"rollout_batch_size {self.rollout.rollout_batch_size} prompts x n_samples_per_prompt "
            f"{self.rollout.n_samples_per_prompt} = {self.samples_per_rollout} samples = "
            f"global_batch_size {self.global_batch_size} x {self.steps_per_rollout} optimizer steps"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the values under their flags' names, for the run directory; secrets are left out."""
        values = flag_values(self)
        values |= {name: secrets.HIDDEN for name, x in values.items() if x and secrets.is_key(name)}
        return {**values, SGLANG_ARGS: secrets.hide(self.sglang_args)}


def _plan_of(config: TrainConfig) -> RunPlan:
    """Return the plan of a run with these flags, valid or not. Raises ConfigError if
    --sglang-tp-size is no number."""
    fallback, rollout, governor = config.fallback, config.rollout, config.governor
    aligned, asked = config.parity.true_on_policy_mode, config.parity.parity_policy
    governed, corrections = governor.mismatch_governor, fallback.corrections
    may_align = aligned or (governed and governor.limits.highest == "aligned")
    may_lag = rollout.rollout_lag > 0 or rollout.rollout_schedule == "free"
    is_alone = governed or not (corrections or fallback.use_rollout_logprobs)
    corrects_lag = may_lag and fallback.correct_lag and is_alone
    # Only aligned engines give the bits that the trainer's own earlier weights gave. With one step per
    # rollout a ratio to the newest weights would be 1, and clip nothing.
    always_aligned = aligned and not governed
    bypasses_lag = (
        corrects_lag
        and always_aligned
        and config.steps_per_rollout == 1
        and OBJECTIVES[config.algorithm.policy_loss].ratio != "none"
    )
    weighs_lag = corrects_lag and not bypasses_lag
    takes_all = governed or bool(fallback.custom_tis_function_path)
    # A governor that centers scores weighs too only if --use-tis is given.
    may_weigh = weighs_lag or (takes_all and not config.num_centered)
    degrees = {"--megatron-tp": config.megatron.megatron_tp}
    if may_align:
        degrees["--sglang-tp-size"] = tensor_parallel_size(config.sglang_args)
    policies: dict[str | None, OnMismatch] = {
        "fail": "fail",
        "warn": "warn",
        "fallback": "fall back",
        None: "fail" if may_align else "warn",
    }
    return RunPlan(
        starts_aligned=aligned,
        may_align=may_align,
        aligned_by=MODE if may_align else "",
        blocks=config.operators.row_parallel_blocks,
        degrees=degrees,
        starts_servers=not config.engine.rollout_server_url,
        is_governed=governed,
        may_lag=may_lag,
        corrections=corrections,
        weighs_lag=weighs_lag,
        bypasses_lag=bypasses_lag,
        may_come_on=("use_tis",) * may_weigh + ("use_rs",) * takes_all,
        on_aligned_mismatch=policies[asked],
        on_stock_mismatch="fail" if asked == "fail" else "measure",
        is_rank_invariant=may_align,
    )
