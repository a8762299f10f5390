"""The flags of `onpolicy eval`. Flags shared with `onpolicy train` come from its groups."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from onpolicy.config import groups
from onpolicy.config.flags import flag_values
from onpolicy.config.kinds import CountOrZero, Directory, Seed
from onpolicy.config.rules import NO_RESULT
from onpolicy.config.train import TrainConfig
from onpolicy.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Evaluate a checkpoint alone, to the numbers that its run would have recorded for it.

    Starts servers and no trainer. Samples the evaluation sets with the seeds of a run, and scores them
    by its rewards. Flags that are not given are those of the run that wrote the checkpoint.
    """

    checkpoint: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT", help_behavior_hint="")
    ] = ""
    """A Hugging Face checkpoint; or one of `onpolicy train` or `onpolicy sft`, a directory of them or of
    their run, of which the latest is meant."""

    rows: groups.RowsConfig = field(default_factory=groups.RowsConfig)
    sets: groups.EvalSetsConfig = field(default_factory=groups.EvalSetsConfig)
    sampling: groups.SamplingConfig = field(default_factory=groups.SamplingConfig)
    agent: groups.AgentConfig = field(default_factory=groups.AgentConfig)
    reward: groups.RewardConfig = field(default_factory=groups.RewardConfig)
    operators: groups.OperatorsConfig = field(default_factory=groups.OperatorsConfig)
    engines: Annotated[groups.SamplersConfig, NO_RESULT] = field(
        default_factory=groups.SamplersConfig
    )

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype."""

    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint whose architecture transformers does not have. It is
    asked for again, whatever the run was given."""

    true_on_policy_mode: bool = True
    """Aligned operators; with --no-true-on-policy-mode the stock ones."""

    seed: Seed = 0
    """Decides every sampled token."""

    log_samples: CountOrZero = 16
    """Samples of every set to write into the run directory; 0: none."""

    json: str = ""
    """Also write the result into this file."""

    run_dir: Directory = "runs/eval"
    """Directory for metrics, samples and logs; made if it is not there."""

    sglang_args: tyro.conf.Suppress[tuple[str, ...]] = ()
    """SGLang's own flags, collected from --sglang-*."""

    def train_config(self, hf_checkpoint: str) -> TrainConfig:
        """Return a run of no rollouts with these evaluations. Raises ConfigError if there is no set."""
        if not (self.sets.eval_prompt_data or self.sets.eval_config):
            raise ConfigError(
                "--eval-prompt-data, --eval-config: neither is given, so there is nothing to evaluate. "
                "Give one."
            )
        return TrainConfig(
            model=groups.ModelConfig(
                hf_checkpoint=hf_checkpoint,
                dtype=self.dtype,
                trust_remote_code=self.trust_remote_code,
            ),
            data=groups.DataConfig(**flag_values(self.rows)),
            rollout=groups.RolloutConfig(num_rollout=0, **flag_values(self.sampling)),
            engine=groups.EngineConfig(**flag_values(self.engines)),
            agent=self.agent,
            reward=self.reward,
            parity=groups.ParityConfig(true_on_policy_mode=self.true_on_policy_mode),
            operators=self.operators,
            sync=groups.WeightSyncConfig(weight_sync="tensor"),
            eval=groups.EvalConfig(eval_interval=1, **flag_values(self.sets)),
            output=groups.OutputConfig(run_dir=self.run_dir, log_samples=self.log_samples),
            seed=self.seed,
            sglang_args=self.sglang_args,
        )
