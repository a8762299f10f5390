"""The flags of `onpolicy verify`, `explain`, `bench`, `serve`, `eval` and `data`.

Flags shared with `onpolicy train` come from its groups.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from fallback_correction.ranges import ReadBy, at_least, at_most
from onpolicy.config import groups, secrets
from onpolicy.config.flags import also, flag_values
from onpolicy.config.groups.reward_flags import RuleName
from onpolicy.config.kinds import (
    Count,
    CountOrZero,
    Directory,
    HeaderText,
    Seconds,
    Seed,
    Temperature,
    Unasked,
)
from onpolicy.config.plan import RunPlan, tool_plan
from onpolicy.config.rules import NO_RESULT, Against, secret
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.config.train_flags import SglangArgs, TrainConfig
from onpolicy.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(SglangArgs):
    """Check that both engines give a checkpoint's tokens the same log-probabilities, bit for bit.

    The command samples with a real SGLang server (prompts share prefixes, prefill is chunked), trains
    one step, pushes the changed weights, samples again, and scores everything with the trainer in other
    batch shapes. It prints the memory and time that it needs first, and refuses what cannot fit. A
    server of --rollout-server-url keeps the changed weights. Adapters of --lora-rank have random
    values. With true-on-policy mode the exit code is 0 only if no token differs."""

    model: groups.ModelConfig = field(default_factory=groups.ModelConfig)
    operators: groups.OperatorsConfig = field(default_factory=groups.OperatorsConfig)
    megatron: groups.MegatronConfig = field(default_factory=groups.MegatronConfig)
    lora: groups.LoraConfig = field(default_factory=groups.LoraConfig)
    servers: groups.ServersConfig = field(default_factory=groups.ServersConfig)
    cluster: groups.ClusterConfig = field(default_factory=groups.ClusterConfig)

    num_prompts: Count = 32
    """Number of prompts in each of the two rounds."""

    max_prompt_len: Annotated[int | None, at_least(8)] = None
    """Length of the longest prompt, in tokens; lengths are random. The default is 1,024, or what the
    model's context allows."""

    max_new_tokens: Count = Unasked(64)
    """Number of tokens sampled for each prompt. The default is lowered to half of the model's context
    where that is shorter."""

    temperature: Temperature = 1.0
    """Sampling temperature."""

    step: bool = True
    """Take an optimizer step between the rounds. With --no-step the same weights are pushed twice, and
    FSDP2's trainer needs 4 bytes per parameter instead of 16, without gradients and optimizer state."""

    seed: Seed = 0
    """Seed of prompts and samples."""

    true_on_policy_mode: bool = True
    """Aligned operators. With --no-true-on-policy-mode the engines run their stock operators, and the
    mismatch is reported."""

    full_vocabulary: Annotated[bool, groups.NEEDS_EQUAL_BITS] = False
    """Also compare the log-probabilities of the whole vocabulary at every sampled token, by digests."""

    by_depth: bool = False
    """Also report the differences of log-probabilities by the number of tokens before a sampled token,
    in buckets that double: KL (k3), mean and largest difference in nats, and the shares of tokens whose
    probabilities differ by a factor beyond 1.28 and 2."""

    train_backend: groups.TrainBackend = "fsdp"
    """Training engine: PyTorch's FSDP2, or Megatron-core, which the --megatron-* flags configure."""

    weight_sync: groups.WeightSync = "auto"
    """Transport of the changed weights to the servers."""

    json: str = ""
    """Also write the report to this file."""

    run_dir: Directory = "runs/verify"
    """Directory for the engines' logs."""

    @property
    def plan(self) -> RunPlan:
        degrees = {
            "--megatron-tp": self.megatron.megatron_tp,
            "--sglang-tp-size": tensor_parallel_size(self.sglang_args),
        }
        mode, starts = self.true_on_policy_mode, not self.servers.rollout_server_url
        return tool_plan(self, mode=mode, degrees=degrees, starts_servers=starts)


NEEDS_RECORDS = Against(
    lambda run: True,
    "the server records what it computes, so it is started by this command",
    "Leave the flag out.",
)


@also(
    rollout_server_url=[NEEDS_RECORDS],
    lora_rank=[groups.NOT_MERGED],
    images=[Against(lambda run: True, "no operator of a vision tower is recorded")],
)
@dataclass(frozen=True, kw_only=True)
class ExplainConfig(VerifyConfig):
    """Name the first operator and layer at which the two engines differ, and by how much.

    The command runs the same tokens through a real SGLang server and through the trainer, and records
    the inputs and outputs of every operator. It names the first operator that gives other bits for the
    same input, and runs it alone on that input, in the shapes of both sides. The exit code is 0 if no
    token's log-probability differs."""

    num_prompts: Count = 8
    """Number of prompts. Their lengths are random, and they share prefixes."""

    step: tyro.conf.Suppress[bool] = False
    """No step is taken."""

    full_vocabulary: tyro.conf.Suppress[bool] = False
    by_depth: tyro.conf.Suppress[bool] = False

    max_new_tokens: Count = Unasked(24)
    """Number of tokens sampled for each prompt. The default is lowered to half of the model's context
    where that is shorter."""

    case: str = ""
    """Replay a mismatch that a run recorded in this file (RUN_DIR/cases), instead of random prompts."""

    load: str = ""
    """Checkpoint of that run, or its --save directory, whose weights replace --hf-checkpoint's."""

    json: str = ""
    """Also write the result to this file, with every operator of every layer."""

    html: str = ""
    """Also write the result as a page to this file: layers by operators, and tokens by their difference.
    The page works offline."""

    run_dir: Directory = "runs/explain"
    """Directory for the engines' logs and the server's records."""


def of_bench(*names: str) -> ReadBy:
    """Return the note on a flag that only some of the benchmarks read."""
    return ReadBy(f"bench {' or '.join(names)}", lambda run: run.what in names)


@also(
    rollout_num_engines=[of_bench("rollout", "agents", "loop")],
    ray_address=[of_bench("rollout", "agents", "loop")],
    actor_num_nodes=[of_bench("loop")],
    actor_num_gpus_per_node=[of_bench("loop")],
    actor_num_ranks_per_node=[of_bench("loop")],
    fsdp_shard_ranks=[of_bench("loop")],
)
@dataclass(frozen=True, kw_only=True)
class BenchConfig(SglangArgs):
    """Compare aligned with stock operators in one run, alternately, by the medians of repetitions.

    `bench rollout` measures an SGLang server of each kind. `bench decode` measures its prefill and
    decoding by batch size and context, on a GPU also with SGLang's deterministic inference. `bench
    agents` measures episodes of several turns with slow tools, asynchronously and turn by turn. `bench
    step` measures an optimizer step. `bench loop` measures whole steps (rollout, rewards, training,
    push); stock operators then include the trainer's log-probabilities of all samples and --use-tis.
    """

    what: Annotated[Literal["rollout", "decode", "agents", "step", "loop"], tyro.conf.Positional]
    """What to measure."""

    model: groups.CheckpointConfig = field(default_factory=groups.CheckpointConfig)
    operators: groups.OperatorsConfig = field(default_factory=groups.OperatorsConfig)
    cpu: groups.CpuConfig = field(default_factory=groups.CpuConfig)
    engines: groups.EngineCountConfig = field(default_factory=groups.EngineCountConfig)
    cluster: groups.ClusterConfig = field(default_factory=groups.ClusterConfig)

    repetitions: Count = 5
    """Number of measurements of each kind, after a warm-up that is not counted."""

    num_prompts: Annotated[Count, of_bench("rollout", "agents", "loop")] = 64
    """rollout: number of prompts sampled at once. agents: number of episodes at once. loop: number of
    prompts per step, each with --n-samples-per-prompt responses."""

    n_samples_per_prompt: Annotated[Count, of_bench("loop")] = 4
    """loop: number of responses to each prompt."""

    prompt_len: Count = Unasked(32)
    """Number of tokens per prompt. The default is lowered to a third of the model's context where that
    is shorter."""

    max_new_tokens: Count = Unasked(96)
    """Number of tokens sampled for each prompt, or trained on in each sequence. The default is lowered
    to what the prompt leaves of the model's context."""

    batch_sizes: Annotated[tuple[int, ...], at_least(1), at_most(256), of_bench("decode")] = (
        1, 8, 64, 256,
    )  # fmt: skip
    """decode: numbers of sequences that a server decodes at once."""

    context_lens: Annotated[tuple[int, ...], at_least(1), of_bench("decode")] = ()
    """decode: numbers of tokens before the first sampled one. The default is 1,024, 8,192 and 32,768, or
    --prompt-len if the model's context holds none of these. Combinations that exceed the context or the
    server's cache are left out, and the result says so."""

    num_turns: Annotated[Count, of_bench("agents")] = 8
    """agents: number of turns per episode. They share --max-new-tokens equally, and a quarter of each
    turn is the tool's."""

    tool_latency: Annotated[Seconds, of_bench("agents")] = 0.2
    """agents: shortest time of a tool call, in seconds. Times are Pareto-distributed with shape 1.2."""

    tool_time_limit: Annotated[Seconds, of_bench("agents")] = 20.0
    """agents: longest time of a tool call, in seconds."""

    longest_response: Annotated[int | None, at_least(1), of_bench("loop")] = None
    """loop: compare schedules (lag 0, lag 1, free) on aligned operators instead of aligned with stock
    operators. Response lengths are log-normal with median --max-new-tokens, and at most this."""

    train_backend: Annotated[
        Literal["fsdp", "megatron", "fsdp,megatron"], of_bench("step", "loop")
    ] = "fsdp"
    """step and loop: training engine. `bench step` can compare both, on aligned operators."""

    num_tokens: Annotated[tuple[int, ...], at_least(1), of_bench("step")] = (2048, 4096, 8192)
    """step: numbers of tokens per optimizer step, each measured by itself."""

    profile: Annotated[bool, of_bench("step")] = False
    """step: also profile by operator, and print both sides' tables."""

    json: str = ""
    """Also write the result to this file."""

    run_dir: Directory = "runs/bench"
    """Directory for the engines' logs."""

    @property
    def plan(self) -> RunPlan:
        """Return the plan of both sides: aligned operators beside stock ones."""
        return RunPlan(
            may_align=True,
            aligned_by="aligned operators",
            blocks=self.operators.row_parallel_blocks,
            degrees={"--sglang-tp-size": tensor_parallel_size(self.sglang_args)},
            starts_servers=self.what != "step",
        )


@dataclass(frozen=True, kw_only=True)
class ServeConfig(SglangArgs):
    """Start SGLang servers under a contract and print how to connect to them.

    They serve runs with --rollout-server-url, and text (docs/serving.md). With --ray-address they run on
    the hosts of that cluster. All servers end when one of them or this command ends."""

    model: groups.ModelConfig = field(default_factory=groups.ModelConfig)
    operators: groups.OperatorsConfig = field(default_factory=groups.OperatorsConfig)
    server: groups.ServerConfig = field(default_factory=groups.ServerConfig)
    engines: groups.EngineCountConfig = field(default_factory=groups.EngineCountConfig)
    cluster: groups.HostsConfig = field(default_factory=groups.HostsConfig)
    gateway: groups.SessionsConfig = field(default_factory=groups.SessionsConfig)

    client_api_key: Annotated[
        HeaderText, secret("--client-api-key"),
        Against(lambda run: secrets.ADMIN_KEY in secrets.split(run.sglang_args)[1],
            "--sglang-admin-api-key is the key of control calls then, and --rollout-api-key that of "
            "clients",
            "Leave one of the two out."),
    ] = ""  # fmt: skip
    """API key of clients, which may request samples but change nothing, or @FILE to read it from a file.
    By default a key is made up. Runs use --rollout-api-key, which allows weight pushes."""

    true_on_policy_mode: bool = True
    """Aligned operators. With --no-true-on-policy-mode the servers run their stock operators."""

    row_digests: Annotated[bool, groups.NEEDS_EQUAL_BITS] = False
    """Digest the log-probabilities of the whole vocabulary at every sampled token, for runs with
    --parity-check full and for verify with --full-vocabulary."""

    seed: Seed = 0
    """Seed of requests that bring none, in the order of their arrival."""

    run_dir: Directory = "runs/serve"
    """Directory for the servers' logs."""

    @property
    def serves_text(self) -> bool:
        """Return whether clients may send text, or only tokens."""
        return "--skip-tokenizer-init" not in self.sglang_args

    @property
    def plan(self) -> RunPlan:
        mode = self.true_on_policy_mode
        degree = tensor_parallel_size(self.sglang_args) if mode else 1
        return tool_plan(self, mode=mode, degrees={"--sglang-tp-size": degree})


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(SglangArgs):
    """Evaluate a checkpoint, with the numbers that its run would have recorded for it.

    The command starts servers but no trainer. It samples the evaluation sets with the seeds of a run
    and scores them by its rewards. The flags of the run that wrote the checkpoint are the defaults.
    """

    checkpoint: Annotated[str, tyro.conf.Positional] = ""
    """A Hugging Face checkpoint; or a checkpoint of `onpolicy train` or `onpolicy sft`, a directory of
    them, or their run directory, of which the latest is taken."""

    rows: groups.RowsConfig = field(default_factory=groups.RowsConfig)
    sets: groups.EvalSetsConfig = field(default_factory=groups.EvalSetsConfig)
    sampling: groups.SamplingConfig = field(default_factory=groups.SamplingConfig)
    agent: groups.AgentConfig = field(default_factory=groups.AgentConfig)
    reward: groups.RewardConfig = field(default_factory=groups.RewardConfig)
    operators: groups.OperatorsConfig = field(default_factory=groups.OperatorsConfig)
    engines: Annotated[groups.SamplersConfig, NO_RESULT] = field(
        default_factory=groups.SamplersConfig
    )

    dtype: groups.Dtype = "bfloat16"
    """Compute dtype."""

    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint, if transformers does not know its architecture. It
    must be given again even if the run had it."""

    images: bool = False
    """Read the images of rows and of agents' messages, as --images of a run does. It must be given again
    even if the run had it."""

    true_on_policy_mode: bool = True
    """Aligned operators. With --no-true-on-policy-mode the servers run their stock operators."""

    seed: Seed = 0
    """Seed of all sampled tokens."""

    log_samples: CountOrZero = 16
    """Number of samples of each set to write into the run directory. 0 writes none."""

    json: str = ""
    """Also write the result to this file."""

    run_dir: Directory = "runs/eval"
    """Directory for metrics, samples and logs. It is created if it does not exist."""

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
                images=self.images,
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


@dataclass(frozen=True, kw_only=True)
class LookedAtConfig(groups.RowsConfig):
    reasoning_gym_size: Count = 100
    """Number of problems of each dataset of reasoning-gym to look at."""


@dataclass(frozen=True, kw_only=True)
class LookConfig:
    """Show the prompts of a file before a run: their number, fields, lengths and errors.

    The command also prints row 1 in the chat template. The exit code is 1 if a run would refuse a row.
    """

    file: Annotated[str, tyro.conf.Positional] = ""
    """A file, a directory written by save_to_disk, or reasoning-gym:NAME, as for --prompt-data."""

    hf_checkpoint: str = ""
    """Checkpoint whose tokenizer counts tokens and whose context limits prompts. Without it lengths are
    in characters."""

    images: bool = False
    """Read the images of rows, as --images of a run does. It needs --hf-checkpoint."""

    rows: LookedAtConfig = field(default_factory=LookedAtConfig)

    rm_type: Literal["", RuleName] = ""
    """Rule that will score responses. Labels with which it would reject correct answers are refused, as
    a run refuses them."""

    rollout_max_response_len: Count = Unasked(1024)
    """Longest response that must fit after a prompt. The default is lowered to half of the model's
    context where that is shorter."""
