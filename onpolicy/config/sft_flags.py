"""The flags of `onpolicy sft`. Flags shared with `onpolicy train` come from its groups."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from fallback_correction.ranges import ReadBy, at_least
from onpolicy.config import groups
from onpolicy.config.flags import also, flag_values
from onpolicy.config.kinds import Count, CountOrZero, Directory, NonNegative, Seed
from onpolicy.config.plan import RunPlan, tool_plan
from onpolicy.config.rules import BY_CONTENT, NO_RESULT, Against, Together
from onpolicy.config.train_flags import NO_CHECKPOINT, TrainConfig

OF_TRAIN = ReadBy("`onpolicy train`", lambda run: False)


@dataclass(frozen=True, kw_only=True)
class AnswersConfig:
    prompt_data: Annotated[
        str,
        BY_CONTENT,
        Together(lambda run: not run.prompt_data,
            "--prompt-data is missing: there is nothing to learn from. Give a path."),
    ] = ""  # fmt: skip
    """Rows to learn from, in a file of any format that `onpolicy train` reads. Required."""

    input_key: str = "prompt"
    """Field of a row that holds the prompt: a string, or a list of chat messages. If the last message is
    the assistant's, all assistant messages are learnt and no label is read."""

    label_key: str = "label"
    """Field of a row that holds the answer to learn. Dots reach into objects."""

    apply_chat_template: bool = False
    """Turn prompts into chats with the tokenizer's chat template."""

    chat_template_kwargs: Annotated[groups.TemplateOptions, groups.BY_TEMPLATE] = "{}"
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'. A variable
    that the template does not read is refused."""

    shuffle: bool = True
    """Visit the rows in a new order in every epoch. --seed fixes the order."""

    eval_prompt_data: Annotated[str, BY_CONTENT] = ""
    """Rows whose loss is measured and that are not trained on."""

    eval_interval: Annotated[
        CountOrZero, NO_RESULT, ReadBy("--eval-prompt-data", lambda run: run.eval_prompt_data)
    ] = 0
    """Also measure that loss after every this many optimizer steps. 0 measures it before the first and
    after the last step only."""

    @property
    def sources(self) -> str:
        """Return the value of --prompt-data, for messages."""
        return self.prompt_data


@also(lr_schedule=[OF_TRAIN])
@dataclass(frozen=True, kw_only=True)
class SftTrainerConfig(groups.TrainerConfig):
    global_batch_size: Annotated[int, at_least(1)] = 64
    """Number of rows per optimizer step."""

    lr: NonNegative = 1e-5
    """Peak learning rate of AdamW."""


@also(
    max_rank_restarts=[OF_TRAIN],
    log_samples=[OF_TRAIN],
    save_best_metric=[OF_TRAIN],
)
@dataclass(frozen=True, kw_only=True)
class SftOutputConfig(groups.OutputConfig):
    run_dir: Directory = "runs/sft"
    """Directory for the configuration, logs and metrics. It is created if it does not exist."""

    save: Annotated[
        str,
        Together(lambda run: not (run.save or run.save_hf),
            "--save, --save-hf: neither is given, so nothing would be left of the run. Give one."),
    ] = ""  # fmt: skip
    """Directory for checkpoints. Each also holds the model as a Hugging Face checkpoint in hf/."""

    save_interval: Annotated[CountOrZero, ReadBy("--save", lambda run: run.save)] = 0
    """Save a checkpoint after every this many optimizer steps. The last step is always saved."""

    save_hf: Annotated[str, NO_RESULT] = ""
    """New directory for the final model as a Hugging Face checkpoint, as `onpolicy train` reads it."""

    allow_changed_settings: Annotated[tuple[str, ...], ReadBy("--load", lambda run: run.load)] = ()
    """Names of settings, as in config.json, that may differ from those of the resumed checkpoint."""


@also(
    hf_checkpoint=[NO_CHECKPOINT],
    images=[Against(lambda run: True, "answers are trained on text alone")],
)
@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Fine-tune on given answers (SFT), with the engines and operators of `onpolicy train`.

    The loss is the negative log-likelihood of the answers' tokens, their mean over the global batch.
    """

    model: groups.ModelConfig = field(default_factory=groups.ModelConfig)
    data: AnswersConfig = field(default_factory=AnswersConfig)
    trainer: SftTrainerConfig = field(default_factory=SftTrainerConfig)
    megatron: groups.MegatronConfig = field(default_factory=groups.MegatronConfig)
    cluster: Annotated[groups.ClusterConfig, NO_RESULT] = field(
        default_factory=groups.ClusterConfig
    )
    operators: groups.OperatorsConfig = field(default_factory=groups.OperatorsConfig)
    cpu: Annotated[groups.CpuConfig, NO_RESULT] = field(default_factory=groups.CpuConfig)
    output: Annotated[SftOutputConfig, NO_RESULT] = field(default_factory=SftOutputConfig)

    num_epoch: Count = 1
    """Number of passes over the rows."""

    max_steps: Annotated[
        CountOrZero, Against(lambda run: run.num_epoch != 1, "--num-epoch says when to end, too")
    ] = 0
    """Number of optimizer steps, instead of --num-epoch. 0 takes as many as the epochs need."""

    true_on_policy_mode: bool = True
    """Aligned operators, whose bits depend neither on the batch nor on the number of data-parallel
    ranks. With --no-true-on-policy-mode the engine runs its stock operators."""

    seed: Seed = 0
    """Seed of the order of the rows."""

    custom_config_path: Annotated[str, NO_RESULT] = ""
    """YAML file with values of flags (keys are the flags' names with _ for -). The command line wins."""

    dry_run: Annotated[bool, NO_RESULT] = False
    """Check everything that can be checked without running, print the configuration and exit."""

    @property
    def sglang_args(self) -> tuple[str, ...]:
        """Return no arguments, since no server is started."""
        return ()

    @property
    def critic_checkpoint(self) -> str:
        return ""

    @property
    def samples_per_rollout(self) -> int:
        """Return the rows of a step."""
        return self.trainer.global_batch_size

    @property
    def plan(self) -> RunPlan:
        degrees = {"--megatron-tp": self.megatron.megatron_tp}
        mode = self.true_on_policy_mode
        return tool_plan(self, mode=mode, degrees=degrees, starts_servers=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the values under their flags' names, for the run directory."""
        return flag_values(self)

    def train_config(self, num_steps: int) -> TrainConfig:
        """Return the trainer's configuration: a run of `num_steps` rollouts with a step each."""
        return TrainConfig(
            model=self.model,
            rollout=groups.RolloutConfig(
                num_rollout=num_steps,
                rollout_batch_size=self.trainer.global_batch_size,
                n_samples_per_prompt=1,
            ),
            engine=groups.EngineConfig(cpu_threads=self.cpu.cpu_threads),
            trainer=self.trainer,
            megatron=self.megatron,
            cluster=self.cluster,
            algorithm=groups.AlgorithmConfig(advantage_estimator="reinforce"),
            parity=groups.ParityConfig(true_on_policy_mode=self.plan.starts_aligned),
            operators=self.operators,
            output=self.output,
            seed=self.seed,
            dry_run=self.dry_run,
        )


AnyRun = TrainConfig | SftConfig
"""A run that writes checkpoints and a run directory."""
