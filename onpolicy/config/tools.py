"""The flags of `onpolicy verify`, `onpolicy bench` and `onpolicy serve`.

Flags shared with `onpolicy train` come from its groups.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import tyro

from fallback_correction.ranges import ReadBy, at_least, at_most
from onpolicy.config import groups, secrets
from onpolicy.config.flags import also
from onpolicy.config.kinds import Count, Directory, HeaderText, Seconds, Seed, Temperature, Unasked
from onpolicy.config.plan import RunPlan, tool_plan
from onpolicy.config.rules import Against, Parsed
from onpolicy.config.sglang_flags import tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Do both engines give a checkpoint's tokens the same log-probabilities, bit for bit?

    Samples with a real SGLang server (prompts share prefixes, prefill is chunked), trains one step,
    pushes the changed weights, samples again, and scores everything with the trainer in other batch
    shapes. Says what memory and time it takes before it starts, and refuses what cannot fit. A server
    of --rollout-server-url is left with the changed weights. Adapters of --lora-rank are drawn, B too.
    Exit code 0 with true-on-policy mode only if not one token differs.
    """

    model: groups.ModelConfig = field(default_factory=groups.ModelConfig)
    operators: groups.OperatorsConfig = field(default_factory=groups.OperatorsConfig)
    megatron: groups.MegatronConfig = field(default_factory=groups.MegatronConfig)
    lora: groups.LoraConfig = field(default_factory=groups.LoraConfig)
    servers: groups.ServersConfig = field(default_factory=groups.ServersConfig)
    cluster: groups.ClusterConfig = field(default_factory=groups.ClusterConfig)

    num_prompts: Count = 32
    """Prompts in each of the two rounds."""

    max_prompt_len: Annotated[int | None, at_least(8)] = None
    """Tokens of the longest of random lengths; if not given 1,024, or what the context leaves."""

    max_new_tokens: Count = Unasked(64)
    """Tokens sampled for every prompt; if not given, at most half of the model's context."""

    temperature: Temperature = 1.0
    """Sampling temperature."""

    step: bool = True
    """Take an optimizer step between the rounds. With --no-step the same weights are pushed twice, and
    FSDP2's trainer holds 4 bytes for each parameter in place of 16: no gradients, and no optimizer."""

    seed: Seed = 0
    """Decides prompts and samples."""

    true_on_policy_mode: bool = True
    """Aligned operators; with --no-true-on-policy-mode the stock ones, whose mismatch is reported."""

    train_backend: groups.TrainBackend = "fsdp"
    """Training engine: PyTorch's FSDP2, or Megatron-core with the --megatron-* flags."""

    weight_sync: groups.WeightSync = "auto"
    """Way of the changed weights to the server."""

    json: str = ""
    """Also write the report into this file."""

    run_dir: Directory = "runs/verify"
    """Directory for the engines' logs."""

    sglang_args: tyro.conf.Suppress[tuple[str, ...]] = ()
    """SGLang's own flags, collected from --sglang-*."""

    @property
    def plan(self) -> RunPlan:
        degrees = {
            "--megatron-tp": self.megatron.megatron_tp,
            "--sglang-tp-size": tensor_parallel_size(self.sglang_args),
        }
        starts = not self.servers.rollout_server_url
        return tool_plan(
            self, mode=self.true_on_policy_mode, degrees=degrees, starts_servers=starts
        )


def of_bench(*names: str) -> ReadBy:
    """Return the note on a flag that only some of the benchmarks read."""
    return ReadBy(f"bench {' or '.join(names)}", lambda run: run.what in names)


@also(
    rollout_num_engines=[of_bench("rollout", "agents", "loop")],
    ray_address=[of_bench("rollout", "agents", "loop")],
    actor_num_nodes=[of_bench("loop")],
    actor_num_gpus_per_node=[of_bench("loop")],
    actor_num_ranks_per_node=[of_bench("loop")],
)
@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Aligned and stock operators side by side in one run, alternating; medians of repetitions.

    `bench rollout` measures an SGLang server of each kind; `bench decode` its prefill and decoding, by
    batch size and context, on a GPU beside SGLang's deterministic inference too; `bench agents` episodes
    of several turns whose tools take their time, free and turn by turn; `bench step` an optimizer step;
    `bench loop` whole steps: rollout, rewards, training, push. There stock operators come with what they
    need, the trainer's log-probabilities of all samples and --use-tis.
    """

    what: Annotated[Literal["rollout", "decode", "agents", "step", "loop"], tyro.conf.Positional]
    """What to measure."""

    model: groups.CheckpointConfig = field(default_factory=groups.CheckpointConfig)
    operators: groups.OperatorsConfig = field(default_factory=groups.OperatorsConfig)
    cpu: groups.CpuConfig = field(default_factory=groups.CpuConfig)
    engines: groups.EngineCountConfig = field(default_factory=groups.EngineCountConfig)
    cluster: groups.ClusterConfig = field(default_factory=groups.ClusterConfig)

    repetitions: Count = 5
    """Measurements of each kind, after one that is thrown away."""

    num_prompts: Annotated[Count, of_bench("rollout", "agents", "loop")] = 64
    """rollout: prompts sampled at once. agents: episodes at once. loop: prompts of a step, each sampled
    --n-samples-per-prompt times."""

    n_samples_per_prompt: Annotated[Count, of_bench("loop")] = 4
    """loop: responses to each prompt."""

    prompt_len: Count = Unasked(32)
    """Tokens per prompt; if not given, at most a third of the model's context."""

    max_new_tokens: Count = Unasked(96)
    """Tokens sampled for every prompt, or trained on in every sequence; if not given, at most what the
    prompt leaves of the model's context."""

    batch_sizes: Annotated[tuple[int, ...], at_least(1), at_most(256), of_bench("decode")] = (
        1, 8, 64, 256,
    )  # fmt: skip
    """decode: sequences that one server decodes at once."""

    context_lens: Annotated[tuple[int, ...], at_least(1), of_bench("decode")] = ()
    """decode: tokens of each sequence before the first that is sampled; if not given 1,024, 8,192 and
    32,768, or --prompt-len where the model's context holds none of these. What exceeds it, or with a
    batch a server's cache, is not measured, and the result says so."""

    num_turns: Annotated[Count, of_bench("agents")] = 8
    """agents: turns of an episode. Each has its part of --max-new-tokens, a quarter of it a tool's."""

    tool_latency: Annotated[Seconds, of_bench("agents")] = 0.2
    """agents: seconds that a tool takes at least; they are Pareto-distributed with the shape 1.2."""

    tool_time_limit: Annotated[Seconds, of_bench("agents")] = 20.0
    """agents: seconds that a tool takes at most."""

    longest_response: Annotated[int | None, at_least(1), of_bench("loop")] = None
    """loop: measure schedules (lag 0, lag 1, segments, both, free) on aligned operators, instead of
    aligned against stock. Each response has a length of its own, log-normal with the median
    --max-new-tokens, and at most this one."""

    train_backend: Annotated[
        Literal["fsdp", "megatron", "fsdp,megatron"], of_bench("step", "loop")
    ] = "fsdp"
    """step and loop: the training engine; `bench step` measures two side by side, both on aligned
    operators."""

    num_tokens: Annotated[tuple[int, ...], at_least(1), of_bench("step")] = (2048, 4096, 8192)
    """step: tokens per optimizer step; one measurement for each."""

    profile: Annotated[bool, of_bench("step")] = False
    """step: measure again, operator by operator, and print the two sides' tables beside each other."""

    json: str = ""
    """Also write the result into this file."""

    run_dir: Directory = "runs/bench"
    """Directory for the engines' logs."""

    sglang_args: tyro.conf.Suppress[tuple[str, ...]] = ()
    """SGLang's own flags, collected from --sglang-*; both servers get them."""

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
class ServeConfig:
    """Start SGLang servers under a contract and print how to connect to them.

    They serve runs with --rollout-server-url, and text (docs/serving.md); with --ray-address on the
    hosts of that cluster. All end when one does, and with this command.
    """

    model: groups.ModelConfig = field(default_factory=groups.ModelConfig)
    operators: groups.OperatorsConfig = field(default_factory=groups.OperatorsConfig)
    server: groups.ServerConfig = field(default_factory=groups.ServerConfig)
    engines: groups.EngineCountConfig = field(default_factory=groups.EngineCountConfig)
    cluster: groups.HostsConfig = field(default_factory=groups.HostsConfig)
    gateway: groups.SessionsConfig = field(default_factory=groups.SessionsConfig)

    client_api_key: Annotated[
        HeaderText, Parsed(partial(secrets.reveal, "--client-api-key")),
        Against(lambda run: secrets.ADMIN_KEY in secrets.split(run.sglang_args)[1],
            "--sglang-admin-api-key is the key of control calls then, and --rollout-api-key that of "
            "clients",
            "Leave one of the two out."),
    ] = ""  # fmt: skip
    """Key for clients, who may ask for samples and change nothing, or @ and a file that holds it; one is
    made up otherwise. That of --rollout-api-key is for runs, which push weights."""

    true_on_policy_mode: bool = True
    """Aligned operators; with --no-true-on-policy-mode the stock ones."""

    seed: Seed = 0
    """Seeds the samples of requests that bring no seed, in the order in which they arrive."""

    run_dir: Directory = "runs/serve"
    """Directory for the servers' logs."""

    sglang_args: tyro.conf.Suppress[tuple[str, ...]] = ()
    """SGLang's own flags, collected from --sglang-*."""

    @property
    def serves_text(self) -> bool:
        """Return whether clients may send text, or only tokens."""
        return "--skip-tokenizer-init" not in self.sglang_args

    @property
    def plan(self) -> RunPlan:
        mode = self.true_on_policy_mode
        degree = tensor_parallel_size(self.sglang_args) if mode else 1
        return tool_plan(self, mode=mode, degrees={"--sglang-tp-size": degree})
