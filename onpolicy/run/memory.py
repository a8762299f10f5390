"""What the processes of a command will hold in memory, as plain sums, before any of them starts.

What is large at the same time, in bytes; `train`, `verify` and `bench` share the sums. Beside measured
peaks: benchmarks/README.md.
What other programs of the host take is none of it: that is subtracted from what is free.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.errors import ConfigError
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.layers import decoder_layers
from onpolicy.ops.backends import backend_of
from onpolicy.ops.base import CPU_LOGITS, GPU_LOGITS, rows_of_logits
from onpolicy.rollout.engine_args import CACHE_MARGIN, EngineSpec
from onpolicy.run.placement import token_bytes
from onpolicy.system.memory import free_memory, gib
from onpolicy.train.activations import recomputes_activations

logger = logging.getLogger(__name__)

FLOAT32 = 4

LIBRARIES = 800 << 20
"""Of a process that has imported PyTorch and transformers."""

SERVER_LIBRARIES = 1600 << 20
"""Of SGLang's processes together: HTTP and tokenizer, scheduler, detokenizer, guard."""

LOGITS_COPIES = 3
"""Logits, their log-probabilities or gradients, and what they are computed from."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a model decides how much memory it takes; all are numbers of elements."""

    parameters: int
    layers: int
    largest_layer: int
    """Parameters of the largest decoder layer."""

    largest_parameter: int
    width: int
    """What all linears of a decoder layer take and give for one token."""

    hidden: int
    vocab: int

    @staticmethod
    def of(config: PretrainedConfig, trust_remote_code: bool = False) -> ModelSize:
        """Counted on the meta device."""
        model = empty_causal_lm(config, trust_remote_code)
        model.tie_weights()
        layers = decoder_layers(model)
        parameters = list(model.parameters())
        return ModelSize(
            parameters=sum(p.numel() for p in parameters),
            layers=len(layers),
            largest_layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
            largest_parameter=max(p.numel() for p in parameters),
            width=max(_width(layer, config) for layer in layers),
            hidden=config.hidden_size,
            vocab=config.vocab_size,
        )

    @property
    def outside_layers(self) -> int:
        """Parameters of embedding, head and last norm, as if all layers were of equal size."""
        return max(self.parameters - self.layers * self.largest_layer, 2 * self.vocab)


def _width(layer: nn.Module, config: PretrainedConfig) -> int:
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    linears = [m.weight for m in layer.modules() if isinstance(m, nn.Linear)]
    experts = [p for p in layer.parameters() if p.dim() == 3]
    return sum(sum(w.shape) for w in linears) + chosen * sum(sum(p.shape[1:]) for p in experts)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of one process, by what they are for; or of several like it."""

    name: str
    parts: dict[str, int]
    count: int = 1

    @property
    def bytes(self) -> int:
        return self.count * sum(self.parts.values())

    def __str__(self) -> str:
        terms = " + ".join(f"{name} {gib(size)}" for name, size in self.parts.items() if size)
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{times}{self.name}: {terms} = {gib(self.bytes)} GiB"


def trainer_memory(
    config: TrainConfig,
    hf_config: PretrainedConfig,
    spec: EngineSpec,
    size: ModelSize,
    count: int = 1,
) -> ProcessMemory:
    """One rank's, while it takes a step; all ranks of the run share what is sharded."""
    trainer, megatron, ranks = config.trainer, config.megatron, config.cluster.num_ranks
    itemsize = getattr(torch, config.model.dtype).itemsize
    shards = ranks
    weights, gathered = FLOAT32 * size.parameters // ranks, 0
    if trainer.train_backend == "megatron":
        model_ranks = megatron.megatron_tp * megatron.megatron_pp
        shards = ranks if megatron.megatron_distributed_optimizer else model_ranks
        copies = FLOAT32 * size.parameters // shards if itemsize != FLOAT32 else 0
        weights = itemsize * size.parameters // model_ranks + copies
        gradients = FLOAT32 * size.parameters // model_ranks
    else:
        gradients = FLOAT32 * size.parameters // ranks
        gathered = (FLOAT32 + itemsize) * (size.outside_layers + 2 * size.largest_layer)
    batch = _tokens_at_once(config, spec.longest_sequence, ranks)
    recomputes = recomputes_activations(trainer, hf_config)
    logits = GPU_LOGITS if backend_of(spec.contract.backend).needs_gpu else CPU_LOGITS
    reference = weights if config.algorithm.use_kl_loss else 0
    return ProcessMemory(
        "trainer rank",
        {
            "weights": weights,
            "gradients": gradients,
            "AdamW": 2 * FLOAT32 * size.parameters // shards,
            "reference": reference,
            "gathered layers": gathered,
            "exchanged gradients": _exchanged(config, size, ranks),
            "activations": _activations(recomputes, size, batch, itemsize),
            "logits": _logits(size, min(batch, rows_of_logits(logits, size.vocab))),
            "libraries": LIBRARIES,
        },
        count,
    )


def _exchanged(config: TrainConfig, size: ModelSize, ranks: int) -> int:
    """What ranks keep beside gradients to add them in order: Megatron's its part of the sums."""
    if ranks == 1 or not config.is_rank_invariant:
        return 0
    if config.trainer.train_backend == "megatron":
        return FLOAT32 * size.parameters // ranks
    return FLOAT32 * max(size.outside_layers, size.largest_layer)


def _tokens_at_once(config: TrainConfig, longest_sequence: int, ranks: int) -> int:
    """Of a micro-batch, or of all samples if they are fewer."""
    rollout = config.rollout
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    total = -(-samples // ranks) * longest_sequence
    return max(longest_sequence, min(config.trainer.max_tokens_per_gpu, total))


def _activations(recomputes: bool, size: ModelSize, tokens: int, itemsize: int) -> int:
    """What the linears of a layer take and give, of every layer; with checkpointing of one, and of
    the others what enters them. Twice for one layer, whose gradients are computed."""
    layer = tokens * size.width * itemsize
    if recomputes:
        return size.layers * tokens * size.hidden * itemsize + 2 * layer
    return (size.layers + 1) * layer


def _logits(size: ModelSize, rows: int) -> int:
    """A chunk's logits, and twice the gradient of the head, which is summed over chunks."""
    return FLOAT32 * size.vocab * (LOGITS_COPIES * rows + 2 * size.hidden)


def server_memory(
    spec: EngineSpec, size: ModelSize, hf_config: PretrainedConfig, servers: int
) -> ProcessMemory:
    """One tensor-parallel rank's; `count` are those of all servers."""
    itemsize, ranks = getattr(torch, spec.contract.dtype).itemsize, spec.tp_size
    tokens = spec.cache_tokens or spec.needed_tokens
    return ProcessMemory(
        "SGLang server" if ranks == 1 else "rank of an SGLang server",
        {
            "weights": itemsize * size.parameters // ranks,
            f"cache of {tokens} tokens": tokens * token_bytes(hf_config, spec.contract) // ranks,
            "logits": FLOAT32 * LOGITS_COPIES * size.vocab * spec.max_concurrency,
            "libraries": SERVER_LIBRARIES,
        },
        servers * ranks,
    )


def push_memory(config: TrainConfig, size: ModelSize) -> ProcessMemory:
    """Weights on their way: gathered, in shared memory or a file, and in the server."""
    itemsize = getattr(torch, config.model.dtype).itemsize
    bucket = min(config.sync.update_weight_buffer_size << 20, itemsize * size.parameters)
    largest = itemsize * size.largest_parameter
    return ProcessMemory("a push", {"3 copies of a bucket": 3 * max(bucket, largest)})


def sides_memory(
    config: TrainConfig,
    hf_config: PretrainedConfig,
    spec: EngineSpec,
    size: ModelSize,
    ranks: int,
    servers: int,
) -> list[ProcessMemory]:
    """What so many ranks and servers hold, of those sides that there are."""
    trainer = [trainer_memory(config, hf_config, spec, size, ranks)] if ranks else []
    return trainer + ([server_memory(spec, size, hf_config, servers)] if servers else [])


def run_memory(
    config: TrainConfig,
    hf_config: PretrainedConfig,
    spec: EngineSpec,
    size: ModelSize,
    ranks: int,
    servers: int,
) -> list[ProcessMemory]:
    """What so many of a run's ranks and servers hold on one host, and a push between them."""
    processes = sides_memory(config, hf_config, spec, size, ranks, servers)
    if not config.engine.rollout_server_url:
        processes.append(push_memory(config, size))
    return processes


def require_run_fits(
    config: TrainConfig, hf_config: PretrainedConfig, spec: EngineSpec, size: ModelSize
) -> None:
    """Say what a run takes. Raises ConfigError, with the sums, if its longest sequence does not fit the
    cache of an engine, or its processes do not fit the memory that is free: of a dry run, which may be
    made on another host, or while something else runs, that is only said."""
    servers = 0 if config.engine.rollout_server_url else config.engine.rollout_num_engines
    if servers:
        require_cache(spec)
    processes = run_memory(config, hf_config, spec, size, config.cluster.num_ranks, servers)
    require_memory(processes, spec.contract.device, config.dry_run, config.cluster.ray_address)


def require_cache(spec: EngineSpec) -> None:
    """Raise ConfigError if one sequence does not fit the cache that is asked for; say if some wait."""
    needed, tokens = spec.needed_tokens, spec.cache_tokens
    if not tokens:
        return  # as much as a GPU has room for, which its server tells when it has started
    if needed > tokens:
        raise ConfigError(
            f"--sglang-max-total-tokens={tokens}: the longest prompt and response have "
            f"{spec.longest_sequence} tokens, and with {CACHE_MARGIN} that SGLang keeps free they need "
            f"{needed}. Raise it, or leave it out."
        )
    if spec.max_concurrency * needed > tokens:
        logger.info(
            "a server's cache of %d tokens holds %d sequences of %d tokens, the longest that may come; "
            "of %d requests in flight the others wait for room",
            tokens, tokens // needed, spec.longest_sequence, spec.max_concurrency,
        )  # fmt: skip


def require_memory(
    processes: Sequence[ProcessMemory],
    device: str,
    is_dry_run: bool = False,
    ray_address: str = "",
) -> None:
    """Say what the processes take; raise ConfigError, with the sums, if they cannot fit.

    On a CPU they share the memory of this host, or of those of the cluster at `ray_address`, which are
    asked when it is known what is on which (`require_hosts`); on GPUs each has one of its own.
    """
    for process in processes:
        logger.info("memory of %s", process)
    try:
        if device == "cuda":
            logger.info("%s", _require_gpus(processes))
        elif not ray_address:
            logger.info("%s", require_host(processes, "this host", free_memory()))
    except ConfigError as error:
        if not is_dry_run:
            raise
        logger.warning("here and now the run would be refused: %s", error)


def _require_gpus(processes: Sequence[ProcessMemory]) -> str:
    free = min(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
    needed = max(process.bytes // process.count for process in processes)
    return _require(processes, needed, "the largest of them", "the fullest GPU", free)


def require_host(processes: Sequence[ProcessMemory], host: str, free: int) -> str:
    """The sum, in words. Raises ConfigError if it is more than the bytes that are free on the host."""
    return _require(processes, sum(p.bytes for p in processes), "together", host, free)


def _require(
    processes: Sequence[ProcessMemory], needed: int, what: str, where: str, free: int
) -> str:
    if needed > free:
        raise ConfigError(
            f"memory={gib(needed)} GiB {what}: {where} has {gib(free)} GiB free. "
            f"{'; '.join(map(str, processes))}. Choose a smaller model, shorter or fewer sequences, "
            "--activation-checkpointing or --max-tokens-per-gpu, more ranks, GPUs or hosts; or free "
            "some memory."
        )
    return f"{gib(needed)} GiB {what}, and {where} has {gib(free)} GiB free"
