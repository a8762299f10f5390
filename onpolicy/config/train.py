"""The typed configuration of a training run. `validate` has the rules that its values must keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tyro

from onpolicy.config import groups, secrets, sglang_flags, tensor_parallel
from onpolicy.config.flags import SGLANG_ARGS, flag_values
from onpolicy.config.kinds import Seed


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Reinforcement learning of a language model, bit for bit on-policy."""

    model: groups.ModelConfig = field(default_factory=groups.ModelConfig)
    data: groups.DataConfig = field(default_factory=groups.DataConfig)
    rollout: groups.RolloutConfig = field(default_factory=groups.RolloutConfig)
    engine: groups.EngineConfig = field(default_factory=groups.EngineConfig)
    cluster: groups.ClusterConfig = field(default_factory=groups.ClusterConfig)
    reward: groups.RewardConfig = field(default_factory=groups.RewardConfig)
    algorithm: groups.AlgorithmConfig = field(default_factory=groups.AlgorithmConfig)
    fallback: groups.FallbackConfig = field(default_factory=groups.FallbackConfig)
    trainer: groups.TrainerConfig = field(default_factory=groups.TrainerConfig)
    megatron: groups.MegatronConfig = field(default_factory=groups.MegatronConfig)
    parity: groups.ParityConfig = field(default_factory=groups.ParityConfig)
    operators: groups.OperatorsConfig = field(default_factory=groups.OperatorsConfig)
    governor: groups.GovernorFlags = field(default_factory=groups.GovernorFlags)
    sync: groups.WeightSyncConfig = field(default_factory=groups.WeightSyncConfig)
    eval: groups.EvalConfig = field(default_factory=groups.EvalConfig)
    output: groups.OutputConfig = field(default_factory=groups.OutputConfig)

    seed: Seed = 0
    """Decides the order of prompts and every sampled token."""

    custom_config_path: str = ""
    """YAML file with values for these flags (keys as flags, with _ for -). The command line wins."""

    dry_run: bool = False
    """Check everything that can be checked, print the resolved configuration, and stop. Too little free
    memory and too few GPUs are said, and not refused: the run may be made elsewhere."""

    sglang_args: tyro.conf.Suppress[tuple[str, ...]] = ()
    """SGLang's own flags, collected from --sglang-*."""

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.trainer.global_batch_size or self.samples_per_rollout

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per rollout."""
        return self.samples_per_rollout // self.global_batch_size

    @property
    def eps_clip_high(self) -> float:
        high = self.algorithm.eps_clip_high
        return self.algorithm.eps_clip if high is None else high

    @property
    def loss_aggregation(self) -> groups.LossAggregation:
        """GSPO's objective is a mean over sequences (arXiv 2507.18071, eq. 5)."""
        if self.algorithm.loss_aggregation is not None:
            return self.algorithm.loss_aggregation
        return "seq-mean-token-mean" if self.algorithm.policy_loss == "gspo" else "token-mean"

    @property
    def may_align(self) -> bool:
        """Whether the run starts on aligned operators, or its governor may move it to them."""
        governor = self.governor
        climbs = governor.mismatch_governor and governor.limits.highest == "aligned"
        return self.parity.true_on_policy_mode or climbs

    @property
    def may_lag(self) -> bool:
        """Whether tokens may come from earlier weights than those that learn from them."""
        rollout = self.rollout
        rules = rollout.rollout_lag or rollout.rollout_segment_tokens
        return bool(rules) or rollout.rollout_schedule == "free"

    @property
    def open_groups(self) -> int:
        """Groups that are drawn at a time."""
        return self.rollout.over_sampling_batch_size or self.rollout.rollout_batch_size

    @property
    def is_rank_invariant(self) -> bool:
        """Whether the bits of a step are to be the same on any number of trainer ranks."""
        return self.trainer.rank_invariant or self.may_align

    @property
    def is_always_aligned(self) -> bool:
        """Whether every rollout runs on aligned operators and the newest weights, so that none is ever
        corrected."""
        aligned = self.parity.true_on_policy_mode and not self.governor.mismatch_governor
        return aligned and self.parity_policy != "fallback" and not self.may_lag

    @property
    def parity_policy(self) -> str:
        """What a mismatched token leads to under aligned operators: fail, warn or fallback."""
        return self.parity.parity_policy or ("fail" if self.may_align else "warn")

    def count_row_parallel_blocks(self) -> int:
        """Blocks of every sum that ranks share. Raises ConfigError for degrees that cannot align."""
        degrees = {"--megatron-tp": self.megatron.megatron_tp}
        if self.may_align:
            degrees["--sglang-tp-size"] = sglang_flags.tensor_parallel_size(self.sglang_args)
        return tensor_parallel.count_blocks(
            self.operators.row_parallel_blocks, degrees, aligned=self.may_align
        )

    def batch_equation(self) -> str:
        """The four sizes of a rollout as one equation."""
        return (
            f"rollout_batch_size {self.rollout.rollout_batch_size} prompts x n_samples_per_prompt "
            f"{self.rollout.n_samples_per_prompt} = {self.samples_per_rollout} samples = "
            f"global_batch_size {self.global_batch_size} x {self.steps_per_rollout} optimizer steps"
        )

    def to_dict(self) -> dict[str, Any]:
        """The values under their flags' names, for the run directory; secrets are left out."""
        values = flag_values(self)
        values["rollout_api_key"] = secrets.HIDDEN if values["rollout_api_key"] else ""
        return {**values, SGLANG_ARGS: secrets.hide(self.sglang_args)}
