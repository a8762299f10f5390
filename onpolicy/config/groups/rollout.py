"""How samples are drawn, the servers that draw them, and the way of new weights to these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import Rule, above, at_least, at_most
from onpolicy.config.kinds import (
    Count,
    CountOrZero,
    Engines,
    HeaderText,
    Port,
    Seconds,
    Threads,
    Unasked,
)

NO_LIMIT_IS_MINUS_ONE = Rule(
    lambda x: x != 0, "must be -1 (no limit) or at least 1. Leave it out for -1."
)


WeightSync = Literal["auto", "tensor", "ipc", "distributed", "disk"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    num_rollout: Count = 100
    """Number of rollouts, each followed by training on it."""

    rollout_batch_size: Count = 32
    """Prompts per rollout."""

    n_samples_per_prompt: Count = 8
    """Responses sampled for every prompt; they form one group."""

    rollout_max_response_len: Count = Unasked(1024)
    """Longest response, in tokens; if not given, at most half of the model's context."""

    rollout_temperature: float = 1.0
    """Divides the logits before sampling, and before log-probabilities are taken on both sides."""

    rollout_top_p: Annotated[float, above(0), at_most(1)] = 1.0
    """Nucleus sampling; only without --true-on-policy-mode."""

    rollout_top_k: Annotated[int, at_least(-1), NO_LIMIT_IS_MINUS_ONE] = -1
    """Sample from the k likeliest tokens; only without --true-on-policy-mode."""

    rollout_min_p: Annotated[float, at_least(0), at_most(1)] = 0.0
    """Drop tokens less likely than this share of the likeliest; not with --true-on-policy-mode."""

    rollout_stop_token_ids: Annotated[tuple[int, ...], at_least(0)] = ()
    """Tokens that end a response, besides the checkpoint's end-of-sequence tokens."""

    rollout_lag: CountOrZero = 0
    """Rollouts by which the weights that sample are behind those that learn: with K the engines sample
    for step k + K while step k trains. 0: each waits for the other (docs/async.md)."""

    rollout_segment_tokens: CountOrZero = 0
    """Draw responses in rounds of at most so many tokens each; those that are not complete when a step
    has its groups go on under the next weights. 0: whole responses, a step's all under one version."""

    rollout_schedule: Literal["rule", "free"] = "rule"
    """What decides which samples a step gets, and from which weights each token comes. rule: the flags
    above. free: the clock; the engines always draw, pushes interrupt them, and groups that are complete
    first are trained on first. What the clock has decided is written down for --replay."""

    max_staleness: Count = 2
    """With --rollout-schedule free: pushes between the weights of a group's oldest token and those that
    learn from it, at most. No group begins for which that could not be, and a step waits for those that
    would be older in the next."""

    replay: str = ""
    """Repeat a run of --rollout-schedule free to the bit: its rollouts.jsonl. Everything else is given
    as it was to that run."""

    dynamic_sampling: bool = False
    """Draw groups in the place of those whose rewards are all equal, until a rollout has all its groups
    (DAPO, arXiv 2503.14476)."""

    dynamic_sampling_limit: Count = 10
    """Groups with equal rewards, in multiples of --rollout-batch-size, after which a rollout is given up
    and the run ends."""

    over_sampling_batch_size: Annotated[int | None, at_least(1)] = None
    """Prompts whose responses are drawn at a time; --rollout-batch-size if not given."""


@dataclass(frozen=True, kw_only=True)
class CpuConfig:
    cpu_threads: Threads = 0
    """Threads for CPU operators of each process; 0 shares the cores. Changes no result."""


@dataclass(frozen=True, kw_only=True)
class KeyConfig(CpuConfig):
    rollout_api_key: HeaderText = ""
    """API key of the servers, or @ and a file that holds it; one is made up for servers that are
    started without. Command lines can be read by everyone on the host, files need not."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(KeyConfig):
    rollout_host: str = "127.0.0.1"
    """Address that servers listen on. Another than loopback needs --rollout-api-key."""

    rollout_base_port: Port = 0
    """Port of the first server; 0 takes free ones."""


@dataclass(frozen=True, kw_only=True)
class EngineCountConfig:
    rollout_num_engines: Engines = 1
    """SGLang servers to start. Where there are no GPUs they share the cores of the hosts."""

    rollout_num_gpus: Annotated[int | None, at_least(1)] = None
    """On GPUs: GPUs of all servers together; says how many servers there are in another way."""

    rollout_num_gpus_per_engine: Annotated[int | None, at_least(1)] = None
    """On GPUs: GPUs of each server, its tensor-parallel ranks; the same as --sglang-tp-size."""


@dataclass(frozen=True, kw_only=True)
class ServersConfig(KeyConfig, EngineCountConfig):
    rollout_server_url: tuple[str, ...] = ()
    """Use these running servers (started with `onpolicy serve`) instead of starting any."""

    colocate: bool = False
    """On GPUs: servers share those of the trainer's ranks instead of taking the ones after them. A
    server takes --sglang-mem-fraction-static of a GPU, 0.4 if it is not given, and gives it back while
    the trainer computes."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ServersConfig, ServerConfig):
    rollout_max_concurrency: Count = 256
    """Requests in flight per server."""

    rollout_request_timeout: Seconds = 1800.0
    """Seconds after which a request counts as lost."""

    rollout_start_timeout: Seconds = 600.0
    """Seconds a server may take to start."""

    rollout_health_timeout: Seconds = 60.0
    """Seconds without a successful health check after which a server counts as dead; also what a call
    other than for samples may take, besides a second for every 100 MiB of weights."""

    rollout_max_restarts: CountOrZero = 3
    """How often dead servers are started again before the run gives up, in all."""

    rollout_weight_format: Literal["", "bf16", "fp8_e4m3", "int8", "int4", "int3"] = ""
    """Round the weights of linear layers when they are pushed to the servers, as such a deployment
    would have them; not under aligned operators."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    weight_sync: WeightSync = "auto"
    """Way of new weights to the servers: tensor (shared memory on the host of the trainer's first rank,
    torch.distributed to other hosts), ipc (CUDA IPC: servers on GPUs of that host read the trainer's
    memory), distributed (torch.distributed to all), or disk (safetensors files in a directory that all
    hosts share). auto is tensor; on GPUs, for servers that the run starts, with ipc in the place of
    shared memory."""

    update_weight_buffer_size: Annotated[int, at_least(1), at_most(1 << 20)] = 512
    """MiB of weights gathered and sent at a time."""
