"""What the processes of a command will hold in memory, as plain sums, before any of them starts.

What is large at the same time, in bytes; `train`, `verify` and `bench` share the sums. Beside measured
peaks: benchmarks/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.models.size import ModelSize
from onpolicy.ops.backends import backend_of
from onpolicy.ops.base import CPU_LOGITS, GPU_LOGITS, rows_of_logits
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.run.launch.host_shares import token_bytes
from onpolicy.system.memory import gib
from onpolicy.train.engine import recomputes_activations

FLOAT32 = 4

LIBRARIES = 800 << 20
"""Bytes of a process that has imported PyTorch and transformers."""

SERVER_LIBRARIES = 1600 << 20
"""Bytes of SGLang's processes together: HTTP and tokenizer, scheduler, detokenizer, guard."""

LOGITS_COPIES = 3
"""Logits, their log-probabilities or gradients, and what they are computed from."""


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
    moments = 2 * FLOAT32 * size.parameters // shards
    if not config.takes_steps:
        moments = 0
        gradients *= trainer.train_backend == "megatron"  # whose buffers are made with the model
    return ProcessMemory(
        "trainer rank",
        {
            "weights": weights,
            "gradients": gradients,
            "AdamW": moments,
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
    if ranks == 1 or not config.plan.is_rank_invariant:
        return 0
    if config.trainer.train_backend == "megatron":
        return FLOAT32 * size.parameters // ranks
    return FLOAT32 * max(size.outside_layers, size.largest_layer)


def _tokens_at_once(config: TrainConfig, longest_sequence: int, ranks: int) -> int:
    """The tokens of a micro-batch, or of all samples if they are fewer."""
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
    """Weights on their way: gathered, in shared memory or a file, and in the server; and those that are
    gathered meanwhile."""
    itemsize = getattr(torch, config.model.dtype).itemsize
    bucket = min(config.sync.update_weight_buffer_size << 20, itemsize * size.parameters)
    largest = itemsize * size.largest_parameter
    return ProcessMemory("a push", {"4 copies of a bucket": 4 * max(bucket, largest)})


@dataclass(frozen=True, slots=True)
class RunMemory:
    """What so many ranks and servers hold: of those sides that there are, on one host or in all."""

    config: TrainConfig
    hf_config: PretrainedConfig
    spec: EngineSpec
    size: ModelSize

    def sides(self, ranks: int, servers: int) -> list[ProcessMemory]:
        """Trainer and servers."""
        config, hf_config, spec, size = self.config, self.hf_config, self.spec, self.size
        trainer = [trainer_memory(config, hf_config, spec, size, ranks)] if ranks else []
        return trainer + ([server_memory(spec, size, hf_config, servers)] if servers else [])

    def with_push(self, ranks: int, servers: int) -> list[ProcessMemory]:
        """These processes, and a push between them."""
        is_elsewhere = bool(self.config.engine.rollout_server_url)
        push = [] if is_elsewhere else [push_memory(self.config, self.size)]
        return self.sides(ranks, servers) + push
