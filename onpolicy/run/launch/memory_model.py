"""The memory of a command's processes, estimated before any of them starts.

Sums, in bytes and by purpose, of everything large that is held at the same time, for every command and
placement (`memory_checks.py`). benchmarks/README.md compares them with measured peaks, none of them on a
GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from onpolicy.agents.workers import num_workers
from onpolicy.config import TrainConfig
from onpolicy.config.groups.agents import has_agent
from onpolicy.config.sglang_flags import chunked_prefill_size
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize, token_bytes
from onpolicy.ops.backends import backend_of
from onpolicy.ops.logit_chunks import CPU_LOGITS, GPU_LOGITS, rows_of_logits
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.run.launch.contracts import rollout_format
from onpolicy.run.launch.process_memory import ProcessMemory
from onpolicy.run.launch.teacher_checks import teacher_bytes
from onpolicy.train.engine import recomputes_activations

FLOAT32 = 4
MIB = 1 << 20

LIBRARIES = 800 * MIB
"""The memory of a process that has imported PyTorch and transformers; on its GPU, the CUDA context."""

SERVER_LIBRARIES = 1600 * MIB
"""The memory of SGLang's processes together: HTTP and tokenizer, scheduler, detokenizer, guard."""

WORKER_LIBRARIES = 64 * MIB
"""The memory of an agent worker and its guard; 55 MiB were measured."""

UNCUT = 16384
"""The number of tokens prefilled at once if prompts are not cut into chunks."""

LOGITS_COPIES = 3
"""The number of buffers of logits: logits, log-probabilities or gradients, and an intermediate."""

CHUNK = 8192
"""The tokens of a prefill chunk on a large GPU, unless --sglang-chunked-prefill-size is given."""

HOLES = 125
"""The unused memory between a rank's buffers on a CPU, in percent of its gradients, as measured."""

TOKEN_RECORD = 200
"""The bytes of a token in the controller: Python numbers for its id, log-probability and advantage, and
their copy in the trainer's shard."""


def _fsdp_states(config: TrainConfig, size: ModelSize, itemsize: int) -> dict[str, int]:
    """Return the bytes of a rank's model state under FSDP, by purpose. Trained weights are float32, all
    others in the compute dtype, and both are sharded over the ranks. Two layers are gathered at a time,
    with their gradients if they are trained."""
    ranks, trained = config.cluster.num_ranks, size.trained * config.takes_steps
    weights = ((FLOAT32 - itemsize) * size.trained + itemsize * size.parameters) // ranks
    gathered = itemsize + FLOAT32 * size.is_trained_whole
    orders = ranks > 1 and config.plan.is_rank_invariant
    return {
        "weights": weights,
        "gradients": FLOAT32 * trained // ranks,
        "AdamW": 2 * FLOAT32 * trained // ranks,
        "masters": weights * bool(rollout_format(config) and not config.lora.lora_rank),
        "reference": itemsize * size.parameters // ranks * config.loads_reference,
        "gathered layers": gathered * (size.outside_layers + 2 * size.largest_layer),
        "exchanged gradients": FLOAT32 * max(size.outside_layers, size.largest_layer) * orders,
    }


def _megatron_states(config: TrainConfig, size: ModelSize, itemsize: int) -> dict[str, int]:
    """Return the bytes of a rank's model state under Megatron, by purpose. Weights and gradient buffers
    exist from the start and are sharded over the model-parallel ranks; optimizer state, if distributed,
    over all ranks."""
    megatron, ranks = config.megatron, config.cluster.num_ranks
    model_ranks = megatron.megatron_tp * megatron.megatron_pp
    shards = ranks if megatron.megatron_distributed_optimizer else model_ranks
    copies = FLOAT32 * size.trained // shards if itemsize != FLOAT32 else 0
    weights = itemsize * size.parameters // model_ranks
    orders = ranks > 1 and config.plan.is_rank_invariant
    return {
        "weights": weights + copies,
        "gradients": FLOAT32 * size.trained // model_ranks,
        "AdamW": 2 * FLOAT32 * size.trained * config.takes_steps // shards,
        "masters": weights * bool(rollout_format(config) and not config.lora.lora_rank),
        "reference": weights * config.loads_reference,
        "exchanged gradients": FLOAT32 * size.trained // ranks * orders,
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
    layer = tokens * size.width * itemsize
    if recomputes:
        return size.layers * tokens * size.hidden * itemsize + 2 * layer
    return (size.layers + 1) * layer


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
    """The memory of a run's processes, with any number of ranks and servers, on one host or in all."""

    config: TrainConfig
    hf_config: PretrainedConfig
    spec: EngineSpec
    size: ModelSize

    def trainer(self, count: int = 1) -> ProcessMemory:
        """Return the memory of `count` ranks during a step; state is sharded over all ranks."""
        config, spec, size = self.config, self.spec, self.size
        on_gpu = spec.contract.device == "cuda"
        itemsize = getattr(torch, config.model.dtype).itemsize
        batch = _tokens_at_once(config, spec.longest_sequence)
        recomputes = recomputes_activations(config.trainer, self.hf_config)
        logits = GPU_LOGITS if backend_of(spec.contract.backend).needs_gpu else CPU_LOGITS
        states = _megatron_states if config.trainer.train_backend == "megatron" else _fsdp_states
        trained = [size, *_critic_size(config, size)]
        own, *others = (states(config, each, itemsize) for each in trained)
        # One model computes at a time.
        gathered = {k: max(s[k] for s in (own, *others)) for k in own.keys() & {"gathered layers"}}
        parts = {
            **own,
            **gathered,
            "critic": sum(s["weights"] + s["gradients"] + s["AdamW"] for s in others),
            "teacher": teacher_bytes(config),
            "activations": max(_activations(recomputes, x, batch, itemsize) for x in trained),
            "logits": _logits(size, min(batch, rows_of_logits(logits, size.vocab))),
            "holes": HOLES * max(s["gradients"] for s in (own, *others)) // 100 * (not on_gpu),
            "libraries": LIBRARIES,
        }
        leaving = ("weights", "AdamW", "masters", "reference", "critic", "teacher")
        away = sum(parts.get(name, 0) for name in leaving) * config.engine.colocate
        host = {"libraries": LIBRARIES, "what leaves the GPU": away} if on_gpu else {}
        return ProcessMemory("trainer rank", parts, count, host)

    def server(self, count: int = 1) -> ProcessMemory:
        """Return the memory of some of its servers."""
        return server_memory(self.spec, self.size, self.hf_config, count)

    def push(self, senders: int = 1) -> ProcessMemory:
        """Return the memory of weights during a push, for each sending rank. A bucket is held four
        times: gathered, in shared memory or a file, in the server, and the next bucket. Where adapters
        are merged, all of them are held, too."""
        itemsize, size = getattr(torch, self.config.model.dtype).itemsize, self.size
        most = min(self.config.sync.update_weight_buffer_size * MIB, itemsize * size.parameters)
        bucket = max(most, itemsize * size.largest_parameter)
        parts = {"4 copies of a bucket": 4 * bucket}
        if size.adapters and (self.config.plan.is_governed or self.spec.contract.adapter is None):
            parts["merging"] = bucket + itemsize * size.adapters + FLOAT32 * size.merging
        return ProcessMemory("a push", parts, senders)

    def controller(self) -> ProcessMemory:
        """Return the memory of the controller beside its libraries: a rollout's samples. Each episode
        counts as one trajectory, since the number of its branches is not known."""
        num_answers = self.config.rollout.rollout_batch_size * self.config.answers_per_prompt
        num_bytes = num_answers * self.spec.longest_sequence * TOKEN_RECORD
        branches = ", if no episode branches" * has_agent(self.config.agent)
        records = {f"samples of a rollout{branches}": num_bytes}
        return ProcessMemory.on_host("controller", records, self.spec.contract.device)

    def agents(self) -> list[ProcessMemory]:
        """Return the memory of agent workers, without their functions' imports and data."""
        config, count = self.config, num_workers(self.config.agent)
        if not count:
            return []
        under_way = -(-config.open_groups * config.rollout.n_samples_per_prompt // count)
        episodes = under_way * self.spec.longest_sequence * TOKEN_RECORD
        parts = {"libraries": WORKER_LIBRARIES, "episodes under way": episodes}
        return [ProcessMemory.on_host("agent worker", parts, self.spec.contract.device, count)]

    def sides(self, ranks: int, servers: int) -> list[ProcessMemory]:
        """Return the memory of trainer and servers."""
        trainer = [self.trainer(ranks)] if ranks else []
        return trainer + ([self.server(servers)] if servers else [])

    def with_push(self, ranks: int, servers: int) -> list[ProcessMemory]:
        """Return the memory of these processes and of a push, which several ranks may send."""
        is_elsewhere = bool(self.config.engine.rollout_server_url)
        spreads = self.config.sync.weight_sync == "distributed"
        senders = max(min(ranks, servers), 1) if spreads else 1
        return self.sides(ranks, servers) + ([] if is_elsewhere else [self.push(senders)])

    @property
    def is_colocated(self) -> bool:
        """Return whether ranks and servers share GPUs, in turn (--colocate)."""
        return self.config.engine.colocate and self.spec.contract.device == "cuda"

    def moments(self) -> list[ProcessMemory]:
        """Return the memory that a rank and a server hold of a shared GPU at the same time, for each
        phase. While servers sample, the trainer's state is in host memory; while the trainer computes,
        the servers' weights and caches are released. During a push both hold weights alone."""
        rank, server = self.trainer().parts, self.server().parts
        libraries = {"libraries": rank["libraries"] + server["libraries"]}
        weights = {"trainer's weights": rank["weights"], "server's weights": server["weights"]}
        moments: dict[str, dict[str, int]] = {
            "servers sample": {
                "server's weights and a sequence": self.static_server(),
                "SGLang beside them": self.beside_static(),
                "libraries": rank["libraries"],
            },
            "servers start": server | libraries,
            "weights are pushed": weights | self.push().parts | libraries,
            "the trainer computes": rank | libraries,
        }
        return [ProcessMemory(f"while {doing}", parts) for doing, parts in moments.items()]

    def static_server(self) -> int:
        """Return the bytes that a server must hold while it samples: its weights, and one sequence."""
        cache = self.spec.needed_tokens * token_bytes(self.hf_config, self.spec.contract)
        return self.server().parts["weights"] + cache // self.spec.tp_size

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
        beside = self.beside_static() + self.trainer().parts["libraries"]
        return max(math.floor(100 * (1 - beside / gpu_bytes)), 1) / 100

    def enough_ranks(self, most: int) -> int | None:
        """Return the least number of ranks (< 4,096) with at most `most` bytes on a GPU, or None."""
        ranks, megatron = self.config.cluster.num_ranks, self.config.megatron
        step = megatron.megatron_tp * megatron.megatron_pp * megatron.megatron_cp
        for number in range(ranks + step, 4096, step):
            run = self._on_ranks(number)
            sides = run.moments() if run.is_colocated else [run.trainer()]
            if all(process.each <= most for process in sides):
                return number
        return None

    def _on_ranks(self, number: int) -> RunMemory:
        ranks = replace(
            self.config.cluster,
            actor_num_nodes=1, actor_num_ranks_per_node=number, actor_num_gpus_per_node=None,
        )  # fmt: skip
        return replace(self, config=replace(self.config, cluster=ranks))
