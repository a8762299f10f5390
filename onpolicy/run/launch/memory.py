"""The memory of a command's processes: estimated, and compared with the free memory, before any starts.

Sums, in bytes and by purpose, of everything large that a rank, a server and a push hold at the same
time; none of them was compared with a GPU's peaks.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.config.groups.agent_flags import has_agent
from onpolicy.config.sglang_flags import chunked_prefill_size
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize, state_bytes, token_bytes
from onpolicy.ops.backends import backend_of
from onpolicy.ops.logit_chunks import CPU_LOGITS, GPU_LOGITS, rows_of_logits
from onpolicy.rollout.engine_args import EngineSpec, require_cache
from onpolicy.run.launch.contracts import rollout_format
from onpolicy.run.launch.teacher_checks import teacher_bytes
from onpolicy.system.free_memory import free_memory, gib, gpus
from onpolicy.training.engine import recomputes_activations

logger = logging.getLogger(__name__)

FLOAT32 = 4
MIB = 1 << 20

LIBRARIES = 800 * MIB
"""The memory of a process that has imported PyTorch and transformers; on its GPU, the CUDA context."""

SERVER_LIBRARIES = 1600 * MIB
"""The memory of SGLang's processes together: HTTP and tokenizer, scheduler, detokenizer, guard."""

LOGITS_COPIES = 3
"""The number of buffers of logits: logits, log-probabilities or gradients, and an intermediate."""

HOLES = 125
"""The unused memory between a rank's buffers on a CPU, in percent of its gradients, as measured."""

CHUNK, UNCUT = 8192, 16384
"""The tokens prefilled at once on a large GPU by default, and if prompts are not cut into chunks."""

REMEDY = (
    "Choose a smaller model, shorter or fewer sequences, --activation-checkpointing or "
    "--max-tokens-per-gpu, more ranks, GPUs or hosts; or free some memory."
)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The bytes of one process, or of each of several equal ones, by purpose. `parts`: where it
    computes, on its GPU or in host memory; `host`: in host memory beside a GPU."""

    name: str
    parts: dict[str, int]
    count: int = 1
    host: dict[str, int] = field(default_factory=dict)

    @property
    def each(self) -> int:
        """Return the bytes of one process, where it computes."""
        return sum(self.parts.values())

    @property
    def bytes(self) -> int:
        return self.count * self.each

    @property
    def host_bytes(self) -> int:
        return self.count * sum(self.host.values())

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        beside = f"; on its host {_terms(self.host)}" if self.host else ""
        return f"{times}{self.name}: {_terms(self.parts)} = {gib(self.bytes)} GiB{beside}"


def _terms(parts: dict[str, int]) -> str:
    return " + ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)


def _states(config: TrainConfig, size: ModelSize, itemsize: int) -> dict[str, int]:
    """Return the bytes of a rank's model state, by purpose. FSDP shards weights over --fsdp-shard-ranks,
    float32 where they are trained, and gathers two layers at a time, with their gradients. Megatron
    shards weights and gradient buffers over the model-parallel ranks, and the optimizer's state
    over all."""
    ranks, trained = config.cluster.num_ranks, size.trained * config.takes_steps
    orders = ranks > 1 and config.plan.is_rank_invariant
    if config.trainer.train_backend == "megatron":
        megatron = config.megatron
        model_ranks = megatron.megatron_tp * megatron.megatron_pp
        reference = itemsize * size.parameters // model_ranks
        weights = reference + FLOAT32 * size.trained // ranks * (itemsize != FLOAT32)
        gradients, exchanged = FLOAT32 * size.trained // model_ranks, size.trained // ranks
        masters, gathered = reference, 0
    else:
        ranks = config.cluster.shard_ranks
        reference = itemsize * size.parameters // ranks
        weights = ((FLOAT32 - itemsize) * size.trained + itemsize * size.parameters) // ranks
        gradients, masters = FLOAT32 * trained // ranks, weights
        exchanged = max(size.outside_layers, size.largest_layer)
        gathered = itemsize + FLOAT32 * size.is_trained_whole
        gathered *= size.outside_layers + 2 * size.largest_layer
    return {
        "weights": weights,
        "gradients": gradients,
        "AdamW": 2 * FLOAT32 * trained // ranks,
        "masters": masters * bool(rollout_format(config) and not config.lora.lora_rank),
        "reference": reference * config.loads_reference,
        "gathered layers": gathered,
        "exchanged gradients": FLOAT32 * exchanged * orders,
    }


def _critic_size(config: TrainConfig, policy: ModelSize) -> list[ModelSize]:
    """Return the critic's size, if any, with an output projection that it does not have."""
    path, trust = config.critic.critic_load, config.model.trust_remote_code
    if path:
        return [ModelSize.of(load_config(path, trust, "--critic-load"), trust)]
    return [policy.whole] * bool(config.critic_checkpoint)


def _tokens_at_once(config: TrainConfig, longest_sequence: int) -> int:
    """Return the tokens of a micro-batch, or of a rank's samples if fewer (without agents)."""
    total, most = config.samples_per_rollout * longest_sequence, config.trainer.max_tokens_per_gpu
    # With shared prefixes, one rank may get all: groups are not split.
    ranks = 1 if config.trainer.shares_prefixes else config.cluster.num_ranks
    fewer = most if has_agent(config.agent) else min(most, -(-total // ranks))
    return max(longest_sequence, fewer)


def _activations(recomputes: bool, size: ModelSize, tokens: int, itemsize: int) -> int:
    """Return the bytes of the inputs and outputs of every layer's linears. With checkpointing, one
    layer's, and the other layers' inputs. One layer counts twice, for its gradients."""
    layer, recurrent = tokens * size.width * itemsize, FLOAT32 * tokens * size.recurrent
    if recomputes:
        return size.layers * tokens * size.hidden * itemsize + 2 * layer + recurrent
    return (size.layers + 1) * layer + recurrent


def _logits(size: ModelSize, rows: int) -> int:
    """Return the bytes of a chunk's logits, and twice a trained head's gradient, summed over chunks."""
    return FLOAT32 * size.vocab * (LOGITS_COPIES * rows + 2 * size.hidden * size.is_trained_whole)


def server_memory(
    spec: EngineSpec, size: ModelSize, hf_config: PretrainedConfig, servers: int
) -> ProcessMemory:
    """Return the memory of `servers` servers, whose processes are their tensor-parallel ranks."""
    itemsize, ranks = getattr(torch, spec.contract.dtype).itemsize, spec.tp_size
    tokens = spec.cache_tokens or spec.needed_tokens
    each = itemsize + backend_of(spec.contract.backend).multiplies_bytes
    parts = {
        "weights": each * size.parameters // ranks,
        f"cache of {tokens} tokens": tokens * token_bytes(hf_config, spec.contract) // ranks,
        "states": max(spec.state_slots, 1) * state_bytes(hf_config, spec.contract),
        "logits": FLOAT32 * LOGITS_COPIES * size.vocab * spec.max_concurrency,
    }
    return ProcessMemory(
        "SGLang server" if ranks == 1 else "rank of an SGLang server",
        {**parts, "libraries": SERVER_LIBRARIES},
        servers * ranks,
        {"libraries": SERVER_LIBRARIES} if spec.contract.device == "cuda" else {},
    )


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The memory of a run's processes."""

    config: TrainConfig
    hf_config: PretrainedConfig
    spec: EngineSpec
    size: ModelSize

    @property
    def trainer(self) -> ProcessMemory:
        """Return the memory of a rank during a step; state is sharded."""
        config, spec, size = self.config, self.spec, self.size
        on_gpu = spec.contract.device == "cuda"
        itemsize = getattr(torch, config.model.dtype).itemsize
        batch = _tokens_at_once(config, spec.longest_sequence)
        recomputes = recomputes_activations(config.trainer, self.hf_config)
        logits = GPU_LOGITS if backend_of(spec.contract.backend).needs_gpu else CPU_LOGITS
        trained = [size, *_critic_size(config, size)]
        own, *others = (_states(config, each, itemsize) for each in trained)
        copy = itemsize * size.trained * config.sync.sparse_weight_sync
        parts = {
            **own,
            # One model computes at a time.
            "gathered layers": max(s["gathered layers"] for s in (own, *others)),
            "critic": sum(s["weights"] + s["gradients"] + s["AdamW"] for s in others),
            "teacher": teacher_bytes(config),
            "activations": max(_activations(recomputes, x, batch, itemsize) for x in trained),
            "logits": _logits(size, min(batch, rows_of_logits(logits, size.vocab))),
            "last push": 0 if on_gpu else copy,
            "holes": HOLES * max(s["gradients"] for s in (own, *others)) // 100 * (not on_gpu),
            "libraries": LIBRARIES,
        }
        leaving = ("weights", "AdamW", "masters", "reference", "critic", "teacher")
        away = sum(parts.get(name, 0) for name in leaving) * config.engine.colocate
        host = {"libraries": LIBRARIES, "what leaves the GPU": away, "last push": copy}
        return ProcessMemory("trainer rank", parts, host=host if on_gpu else {})

    @property
    def push(self) -> ProcessMemory:
        """Return the memory of a push: a bucket that is gathered, in shared memory or a file, and in the
        server, and the next one."""
        itemsize, size = getattr(torch, self.config.model.dtype).itemsize, self.size
        most = min(self.config.sync.update_weight_buffer_size * MIB, itemsize * size.parameters)
        bucket = max(most, itemsize * size.largest_parameter)
        return ProcessMemory("a push", {"4 copies of a bucket": 4 * bucket})

    def sides(self, ranks: int, servers: int) -> list[ProcessMemory]:
        """Return the memory of so many ranks and servers."""
        trainer = [replace(self.trainer, count=ranks)] if ranks else []
        server = server_memory(self.spec, self.size, self.hf_config, servers)
        return trainer + ([server] if servers else [])

    def with_push(self, ranks: int, servers: int) -> list[ProcessMemory]:
        """Return the memory of these processes, and of a push to servers of our own."""
        is_elsewhere = bool(self.config.engine.rollout_server_url)
        return self.sides(ranks, servers) + ([] if is_elsewhere else [self.push])

    def moments(self) -> list[ProcessMemory]:
        """Return the memory that a rank and a server hold of a shared GPU at the same time, for each
        phase. While servers sample, the trainer's state is in host memory; while the trainer computes,
        the servers' weights and caches are released. During a push both hold weights alone."""
        rank, server = (each.parts for each in self.sides(1, 1))
        of_token = token_bytes(self.hf_config, self.spec.contract)
        libraries = {"libraries": rank["libraries"] + server["libraries"]}
        weights = {"trainer's weights": rank["weights"], "server's weights": server["weights"]}
        moments: dict[str, dict[str, int]] = {
            "servers sample": {
                "server's weights": server["weights"],
                "a sequence": self.spec.needed_tokens * of_token // self.spec.tp_size,
                "SGLang beside them": self.beside_static(),
                "libraries": rank["libraries"],
            },
            "servers start": server | libraries,
            "weights are pushed": weights | self.push.parts | libraries,
            "the trainer computes": rank | libraries,
        }
        return [
            ProcessMemory(f"a shared GPU while {doing}", parts) for doing, parts in moments.items()
        ]

    def beside_static(self) -> int:
        """Return the bytes that SGLang keeps free beside weights and cache, for activations and CUDA
        graphs. Source: sglang/srt/arg_groups/memory_hook.py, the rule for one large GPU."""
        asked = chunked_prefill_size(self.spec.sglang_args)
        chunk = CHUNK if asked is None else asked if asked > 0 else UNCUT
        graphs = 2 * self.spec.max_concurrency
        return (512 + 3 * max(chunk, 2048) // 2 + graphs + 128 * self.spec.tp_size) * MIB

    def fraction(self, gpu_bytes: int) -> float:
        """Return the fraction of a shared GPU that a server gets for weights and cache. It leaves out
        the memory beside them while the server samples; in hundredths, rounded down, at least 0.01."""
        beside = self.beside_static() + self.trainer.parts["libraries"]
        return max(math.floor(100 * (1 - beside / gpu_bytes)), 1) / 100


def require_run_fits(
    config: TrainConfig, hf_config: PretrainedConfig, spec: EngineSpec, size: ModelSize, ranks: int
) -> None:
    """Log the memory of a run with so many ranks. Raises ConfigError, with the sums, if its longest
    sequence does not fit an engine's cache, or if its processes do not fit the free memory. A dry run
    only logs the latter, since the run may be made on another host or at another time."""
    if servers := config.engine.num_started:
        require_cache(spec)
    run = RunMemory(config, hf_config, spec, size)
    processes = run.with_push(ranks, servers)
    try:
        require_memory(processes, spec.contract.device, config.cluster.ray_address, run)
    except ConfigError as error:
        if not config.dry_run:
            raise
        logger.warning("here and now the run would be refused: %s", error)


def require_memory(
    processes: Sequence[ProcessMemory],
    device: str,
    ray_address: str = "",
    run: RunMemory | None = None,
) -> None:
    """Log the memory of the processes; raise ConfigError, with the sums, if they cannot fit. On a CPU
    they share the memory of this host. On GPUs each process has one of its own, or a rank and a server
    of `run` share one. Hosts at `ray_address` are checked when placed (`cluster_engines.fitting`)."""
    colocates = run is not None and run.config.engine.colocate and device == "cuda"
    shared = run if colocates else None
    for process in [*processes, *(shared.moments() if shared else ())]:
        logger.info("memory of %s", process)
    if ray_address:
        return
    if device == "cuda":
        fullest = min(gpu.free for gpu in gpus())
        logger.info("%s", require_gpu(processes, "the fullest GPU", fullest, shared))
    logger.info("%s", require_host(processes, "this host", free_memory(), device))


def require_host(processes: Sequence[ProcessMemory], host: str, free: int, device: str) -> str:
    """Return the sum of the processes' memory on a host, or of the part beside its GPUs, in words.
    Raises ConfigError if it exceeds the host's `free` bytes."""
    on_gpus = device == "cuda"
    needed = sum(p.host_bytes if on_gpus else p.bytes for p in processes)
    return _require(processes, needed, "beside GPUs" if on_gpus else "together", host, free)


def require_gpu(
    processes: Sequence[ProcessMemory], gpu: str, free: int, shared: RunMemory | None = None
) -> str:
    """Return the largest process on a GPU, in words, or the most that a rank and a server of `shared`
    hold of it at the same time. Raises ConfigError if that exceeds the `free` bytes."""
    held = processes if shared is None else shared.moments()
    return _require(held, max(process.each for process in held), "the largest of them", gpu, free)


def _require(
    processes: Sequence[ProcessMemory], needed: int, what: str, where: str, free: int
) -> str:
    if needed > free:
        raise ConfigError(
            f"memory={gib(needed)} GiB {what}: {where} has {gib(free)} GiB free. "
            f"{'; '.join(map(str, processes))}. {REMEDY}"
        )
    return f"{gib(needed)} GiB {what}, and {where} has {gib(free)} GiB free"
