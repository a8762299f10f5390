"""The flags of the servers that sample, of weight pushes to them, and of a run's hosts and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from fallback_correction.ranges import ReadBy, at_least, at_most
from onpolicy.config import secrets
from onpolicy.config.flags import also
from onpolicy.config.kinds import (
    LAST_PORT,
    Count,
    CountOrZero,
    Engines,
    HeaderText,
    Port,
    Seconds,
    Threads,
)
from onpolicy.config.rules import Against, DecidesResults, Facts, Parsed, Together, secret
from onpolicy.errors import ConfigError
from onpolicy.system.network import is_loopback

WeightSync = Annotated[
    Literal["auto", "tensor", "ipc", "distributed", "disk"],
    Against(
        lambda run: run.weight_sync == "distributed" and run.colocate,
        "with --colocate a server and the trainer are on one GPU, and a group of NCCL's takes each GPU "
        "once",
        "Choose --weight-sync tensor or ipc.",
    ),
]
ActivationFormat = Literal["", "fp8_e4m3"]
"""See `onpolicy/models/rounded_inputs.py`; empty: the model's dtype."""

WeightFormat = Literal[
    "", "bf16", "fp8_e4m3", "fp8_e4m3_block128", "int8", "int4", "int4_group128", "int3",
]  # fmt: skip
NOT_IN_FLOAT16 = Against(
    lambda run: run.dtype == "float16",
    "rounded weights and inputs were tried in bfloat16 and float32 alone, and not in --dtype float16",
    "Choose --dtype bfloat16, or leave the flag out.",
)
OWN_SERVERS = ReadBy(
    "a run without --rollout-server-url, which starts its servers itself,",
    lambda run: run.plan.starts_servers,
)
NONE_STARTED = Against(
    lambda run: run.rollout_server_url, "with --rollout-server-url no server is started"
)
ALWAYS_SAMPLING = Against(
    lambda run: run.rollout_schedule == "free",
    "servers give their memory back while the trainer computes, and with --rollout-schedule free they "
    "sample meanwhile",
)


def require_urls(urls: Sequence[str]) -> None:
    """Raise ConfigError for URLs that name no server, or one server twice."""
    for number, url in enumerate(urls):
        if rule := _broken_rule(url):
            remedy = "Give http://HOST:PORT, as `onpolicy serve` prints it."
            raise ConfigError(f"--rollout-server-url={url}: {rule}. {remedy}")
        if url.rstrip("/") in [other.rstrip("/") for other in urls[:number]]:
            raise ConfigError(
                f"--rollout-server-url={url}: given twice, and a server is used once. Leave one out."
            )


def _broken_rule(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no URL ({error})"
    if parts.scheme not in ("http", "https"):
        return "does not begin with http:// or https://"
    if not parts.hostname or port == 0:
        return "names no host" if not parts.hostname else "has the port 0, which no server has"
    if parts.query or parts.fragment or parts.username or any(c.isspace() for c in url):
        return "holds more than a scheme, a host, a port and a path"
    return None


def _beyond_ports(run: Facts) -> int | None:
    """Return the port of the last server if it is beyond the last port."""
    last: int = run.rollout_base_port + run.rollout_num_engines - 1
    return last if last > LAST_PORT else None


@dataclass(frozen=True, kw_only=True)
class CpuConfig:
    cpu_threads: Threads = 0
    """Number of threads per process for CPU operators. 0 divides the cores among the processes. The
    number changes no result."""


@dataclass(frozen=True, kw_only=True)
class KeyConfig(CpuConfig):
    rollout_api_key: Annotated[HeaderText, secret("--rollout-api-key")] = ""
    """API key of the servers, or @FILE to read it from a file. By default a key is made up for the
    servers that the run starts. Other users of the host can read command lines, but not necessarily the
    file."""


@dataclass(frozen=True, kw_only=True)
class RoundingConfig:
    rollout_weight_format: Annotated[
        WeightFormat,
        DecidesResults(True),
        Against(lambda run: not (run.plan.starts_aligned or hasattr(run, "train_backend")),
            "without --true-on-policy-mode the run that pushes the weights rounds them",
            "Give it to `onpolicy train`."),
        NOT_IN_FLOAT16,
    ] = ""  # fmt: skip
    """Round the weights of linear layers to this format, as a quantised deployment would: with one scale
    per output channel, per 128 input channels of an output channel (group128), or per 128 x 128 block
    (block128). With --true-on-policy-mode both engines compute with the rounded weights, otherwise only
    the servers do. By default weights are not rounded."""

    rollout_activation_format: Annotated[
        ActivationFormat,
        DecidesResults(True),
        Against(lambda run: run.plan.is_governed or not run.plan.starts_aligned,
            "both engines round it by the same function, which stock operators do not",
            "Add --true-on-policy-mode without --mismatch-governor, or leave the flag out."),
        NOT_IN_FLOAT16,
    ] = ""  # fmt: skip
    """Round the inputs of linear layers to FP8 with one scale per token, as a deployment with FP8
    products would. Both engines compute with the rounded inputs. By default inputs are not rounded."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(KeyConfig, RoundingConfig):
    rollout_host: Annotated[
        str, OWN_SERVERS,
        Against(lambda run: not is_loopback(run.rollout_host) and not run.rollout_api_key,
            "a server that others can reach needs a key",
            "Add --rollout-api-key, or leave the address at 127.0.0.1."),
    ] = "127.0.0.1"  # fmt: skip
    """Address that the servers listen on. Any address but loopback needs --rollout-api-key."""

    rollout_base_port: Annotated[
        Port, OWN_SERVERS, Against(_beyond_ports,
            "the last of --rollout-num-engines {run.rollout_num_engines} ports would be {found}, beyond "
            f"{LAST_PORT}",
            "Give a smaller port, or leave the flag out."),
    ] = 0  # fmt: skip
    """Port of the first server; the others take the ports after it. 0 takes free ports."""


@dataclass(frozen=True, kw_only=True)
class EngineCountConfig:
    rollout_num_engines: Engines = 1
    """Number of SGLang servers to start. Each takes --sglang-tp-size GPUs, 1 by default; without GPUs
    the servers share the cores."""


@also(rollout_num_engines=[NONE_STARTED])
@dataclass(frozen=True, kw_only=True)
class FoundServersConfig(KeyConfig, EngineCountConfig):
    rollout_server_url: Annotated[
        tuple[str, ...],
        Together(lambda run: run.rollout_server_url and " ".join(secrets.hide(run.sglang_args)),
            "--sglang-*={found}: with --rollout-server-url no server is started, so nothing would read "
            "it. Give it to the command that starts the server."),
        Parsed(require_urls),
    ] = ()  # fmt: skip
    """URLs of running servers (started by `onpolicy serve`) to use instead of starting servers."""

    @property
    def num_started(self) -> int:
        """Return the number of servers that the command starts itself."""
        return 0 if self.rollout_server_url else self.rollout_num_engines


@dataclass(frozen=True, kw_only=True)
class ServersConfig(FoundServersConfig, RoundingConfig):
    colocate: Annotated[bool, OWN_SERVERS] = False
    """Run the servers on the trainer's GPUs instead of on the GPUs after them. A server uses
    --sglang-mem-fraction-static of a GPU, 0.4 by default, and frees it while the trainer computes."""


@dataclass(frozen=True, kw_only=True)
class SamplersConfig(CpuConfig, EngineCountConfig, RoundingConfig):
    rollout_max_concurrency: Count = 256
    """Largest number of requests in flight per server."""

    rollout_request_timeout: Seconds = 1800.0
    """Seconds after which a request to a server counts as lost."""

    rollout_start_timeout: Seconds = 600.0
    """Seconds that a server, the run's own Ray cluster and each trainer process may take to start."""

    rollout_health_timeout: Seconds = 60.0
    """Seconds without a successful health check after which a server counts as dead. Calls that do not
    sample may take as long, and one more second for every 100 MiB of weights."""

    rollout_max_restarts: Annotated[CountOrZero, OWN_SERVERS] = 3
    """Number of times that dead servers are restarted before the run gives up, over all servers."""


@also(colocate=[ALWAYS_SAMPLING])
@dataclass(frozen=True, kw_only=True)
class EngineConfig(ServersConfig, ServerConfig, SamplersConfig):
    """The server flags of a run."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    weight_sync: WeightSync = "auto"
    """Transport of new weights to the servers: `tensor` (shared memory on hosts with trainer ranks,
    torch.distributed to other hosts), `ipc` (CUDA IPC: servers read the trainer's GPU memory on their
    host), `distributed` (torch.distributed to all), `disk` (safetensors files in a directory that all
    hosts share). `auto` is tensor, with ipc in place of shared memory on GPUs for servers that the run
    starts."""

    sparse_weight_sync: Annotated[
        bool,
        Against(lambda run: not run.plan.may_align,
            "only aligned engines prove what they hold, which changes are put into",
            "Add --true-on-policy-mode, or leave the flag out."),
        Against(lambda run: run.colocate,
            "servers give the memory of their weights back while the trainer computes"),
    ] = False  # fmt: skip
    """Send places and values of the weights whose bits changed since the last push, of each tensor of
    which at most a fifth changed. A server that does not prove that it holds the last push gets all.
    Each trainer rank that sends keeps a copy of the trained weights in host memory. The flag changes no
    result; within a host it saves no time."""

    update_weight_buffer_size: Annotated[int, at_least(1), at_most(1 << 20)] = 512
    """MiB of weights that are gathered and sent at a time."""


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    ray_address: Annotated[
        str,
        Against(lambda run: "://" in run.ray_address,
            "is no host:port; a run is part of the cluster, and no client of it",
            "Start a node on this host (`ray start --address=HEAD:6379`), and give auto."),
    ] = ""  # fmt: skip
    """Address of the Ray cluster to join: host:port, or auto for the cluster of this host. By default
    the run starts a cluster on this host, which ends with it."""


def _other_shard_ranks(run: Facts) -> str | None:
    """Return the possible values of --fsdp-shard-ranks, if the requested one is not among them."""
    ranks, on_host = run.config.cluster.num_ranks, run.config.cluster.ranks_per_node
    divisors = (n for n in range(1, ranks + 1) if ranks % n == 0)
    fits = [n for n in divisors if on_host % n == 0 or n % on_host == 0]
    return None if run.fsdp_shard_ranks in fits else ", ".join(map(str, fits))


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(HostsConfig):
    actor_num_nodes: Count = 1
    """Number of hosts with trainer ranks."""

    actor_num_gpus_per_node: Annotated[int | None, at_least(1)] = None
    """Number of GPUs for the trainer on each host, with one rank per GPU. The default is 1. Refused on
    hosts without GPUs."""

    actor_num_ranks_per_node: Annotated[int | None, at_least(1)] = None
    """Number of trainer ranks on each host if there are no GPUs. They share the host's cores. The
    default is 1."""

    fsdp_shard_ranks: Annotated[
        CountOrZero,
        ReadBy("--train-backend fsdp", lambda run: "fsdp" in run.train_backend),
        Against(_other_shard_ranks,
            "the trainer's {run.config.cluster.num_ranks} ranks must be a whole number of such groups, "
            "and the {run.config.cluster.ranks_per_node} of a host too, unless a group has whole hosts",
            "Possible are {found}."),
    ] = 0  # fmt: skip
    """Number of neighbouring trainer ranks over which FSDP2 shards a model; each such group holds a
    replica of it (HSDP). With the ranks of a host, weights are gathered within hosts alone. Aligned
    runs keep their bits. 0 shards over all ranks."""

    rank_timeout: Seconds = 900.0
    """Seconds without any CPU use by a trainer rank, while all ranks are waited for, after which the
    ranks count as hung and are killed; at least --rollout-health-timeout. A call that computes may take
    any time. Ranks that wait in an NCCL collective use the CPU, so NCCL's own timeout of 2 hours applies
    to them."""

    @property
    def ranks_per_node(self) -> int:
        """Return the number of trainer ranks on each of its hosts."""
        return self.actor_num_gpus_per_node or self.actor_num_ranks_per_node or 1

    @property
    def num_ranks(self) -> int:
        return self.actor_num_nodes * self.ranks_per_node

    @property
    def shard_ranks(self) -> int:
        """Return the number of ranks over which FSDP2 shards a model."""
        return self.fsdp_shard_ranks or self.num_ranks
