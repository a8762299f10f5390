"""The flags of the servers that sample, and of weight pushes to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
from onpolicy.config.rules import Against, DecidesResults, Facts, Parsed, Together
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
    """Threads for CPU operators of each process; 0 shares the cores. Changes no result."""


@dataclass(frozen=True, kw_only=True)
class KeyConfig(CpuConfig):
    rollout_api_key: Annotated[HeaderText, Parsed(partial(secrets.reveal, "--rollout-api-key"))] = (
        ""
    )
    """API key of the servers, or @ and a file that holds it; one is made up for servers that are
    started without. Command lines can be read by everyone on the host, files need not."""


@dataclass(frozen=True, kw_only=True)
class RoundingConfig:
    rollout_weight_format: Annotated[
        WeightFormat,
        DecidesResults(True),
        Against(lambda run: not (run.plan.starts_aligned or hasattr(run, "train_backend")),
            "without --true-on-policy-mode the run that pushes the weights rounds them",
            "Give it to `onpolicy train`."),
    ] = ""  # fmt: skip
    """Round the weights of linear layers, as a deployment in this format would have them: with a scale
    for each output channel, for 128 input channels of one (group128), or for 128 x 128 (block128). With
    --true-on-policy-mode both engines compute with them, else the servers alone."""

    rollout_activation_format: Annotated[
        ActivationFormat,
        DecidesResults(True),
        Against(lambda run: run.plan.is_governed or not run.plan.starts_aligned,
            "both engines round it by the same function, which stock operators do not",
            "Add --true-on-policy-mode without --mismatch-governor, or leave the flag out."),
    ] = ""  # fmt: skip
    """Round what linear layers read to FP8, with a scale for each token, as a deployment that multiplies
    in FP8 does. Both engines compute with what was rounded."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(KeyConfig, RoundingConfig):
    rollout_host: Annotated[
        str, OWN_SERVERS,
        Against(lambda run: not is_loopback(run.rollout_host) and not run.rollout_api_key,
            "a server that others can reach needs a key",
            "Add --rollout-api-key, or leave the address at 127.0.0.1."),
    ] = "127.0.0.1"  # fmt: skip
    """Address that servers listen on. Another than loopback needs --rollout-api-key."""

    rollout_base_port: Annotated[
        Port, OWN_SERVERS, Against(_beyond_ports,
            "the last of --rollout-num-engines {run.rollout_num_engines} ports would be {found}, beyond "
            f"{LAST_PORT}",
            "Give a smaller port, or leave the flag out."),
    ] = 0  # fmt: skip
    """Port of the first server; 0 takes free ones."""


@dataclass(frozen=True, kw_only=True)
class EngineCountConfig:
    rollout_num_engines: Engines = 1
    """SGLang servers to start. Where there are no GPUs they share the cores of the hosts."""

    rollout_num_gpus: Annotated[int | None, at_least(1), OWN_SERVERS] = None
    """On GPUs: GPUs of all servers together; says how many servers there are in another way."""

    rollout_num_gpus_per_engine: Annotated[int | None, at_least(1), OWN_SERVERS] = None
    """On GPUs: GPUs of each server, its tensor-parallel ranks; the same as --sglang-tp-size."""

    @property
    def num_started(self) -> int:
        """Return the number of servers that the command starts itself."""
        return self.rollout_num_engines


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
    """Use these running servers (started with `onpolicy serve`) instead of starting any."""

    @property
    def num_started(self) -> int:
        return 0 if self.rollout_server_url else self.rollout_num_engines


@dataclass(frozen=True, kw_only=True)
class ServersConfig(FoundServersConfig, RoundingConfig):
    colocate: Annotated[bool, OWN_SERVERS] = False
    """On GPUs: servers share those of the trainer's ranks instead of taking the ones after them. A
    server takes --sglang-mem-fraction-static of a GPU, 0.4 if it is not given, and gives it back while
    the trainer computes."""


@dataclass(frozen=True, kw_only=True)
class SamplersConfig(CpuConfig, EngineCountConfig, RoundingConfig):
    rollout_max_concurrency: Count = 256
    """Requests in flight per server."""

    rollout_request_timeout: Seconds = 1800.0
    """Seconds after which a request counts as lost."""

    rollout_start_timeout: Seconds = 600.0
    """Seconds a server may take to start; also a Ray cluster of this host's own, and each rank of the
    trainer's process."""

    rollout_health_timeout: Seconds = 60.0
    """Seconds without a successful health check after which a server counts as dead; also what a call
    other than for samples may take, besides a second for every 100 MiB of weights."""

    rollout_max_restarts: Annotated[CountOrZero, OWN_SERVERS] = 3
    """How often dead servers are started again before the run gives up, in all."""


@also(colocate=[ALWAYS_SAMPLING])
@dataclass(frozen=True, kw_only=True)
class EngineConfig(ServersConfig, ServerConfig, SamplersConfig):
    """The server flags of a run."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    weight_sync: WeightSync = "auto"
    """Way of new weights to the servers: tensor (shared memory on hosts with ranks of the trainer,
    torch.distributed to others), ipc (CUDA IPC: servers read the memory of the trainer's GPUs on their
    host), distributed (torch.distributed to all), or disk (safetensors files in a directory that all
    hosts share). auto is tensor; on GPUs, for servers that the run starts, with ipc in the place of
    shared memory."""

    update_weight_buffer_size: Annotated[int, at_least(1), at_most(1 << 20)] = 512
    """MiB of weights gathered and sent at a time."""
