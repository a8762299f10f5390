"""The layout of a Megatron model over ranks, checked against the model before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.training.megatron.adapter_map import ADAPTED
from onpolicy.training.megatron.family import divided_sizes, family_of, num_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """Degrees of parallelism. The remaining factor of the number of ranks is data parallelism."""

    tensor_model_parallel_size: int = 1
    """Number of ranks that shard every linear layer and the vocabulary."""

    pipeline_model_parallel_size: int = 1
    """Number of pipeline stages."""

    context_parallel_size: int = 1
    """Number of ranks that shard the tokens of every sequence."""

    expert_model_parallel_size: int = 1
    """Number of ranks that divide the whole experts among them; a subset of ranks with different
    tokens."""

    sequence_parallel: bool = False
    """Whether tensor-parallel ranks shard the tokens between linear layers."""

    recompute_activations: bool = False
    """Whether the backward pass recomputes each layer from its input, which alone is kept."""

    @property
    def needs_cuda_names(self) -> bool:
        """Return whether Megatron's code for this layout calls functions that exist only with CUDA."""
        return (
            self.sequence_parallel
            or self.recompute_activations
            or self.pipeline_model_parallel_size > 1
        )

    def check(self, config: Any, contract: NumericsContract, world_size: int) -> None:
        """Raise ConfigError if a model of this Hugging Face configuration does not support this
        layout."""
        if contract.dtype == "float16":
            raise ConfigError(
                "--dtype=float16: --train-backend megatron does not scale the loss. Choose "
                "--train-backend fsdp, or --dtype bfloat16."
            )
        family = family_of(config)
        for name in ("attention_bias", "mlp_bias"):
            if getattr(config, name, False) and name != family.qkv_bias:
                raise ConfigError(
                    f"{name}=True: --train-backend megatron has no biases in linears that are summed "
                    "over tensor-parallel ranks. Use --train-backend fsdp for this model."
                )
        for problem in self._problems(config, contract, world_size):
            raise ConfigError(problem)

    def _problems(self, config: Any, contract: NumericsContract, world_size: int) -> Iterator[str]:
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        cp, ep = self.context_parallel_size, self.expert_model_parallel_size
        experts = num_experts(config)
        for name, degree in (("tp", tp), ("pp", pp), ("cp", cp), ("ep", ep)):
            if degree < 1:
                yield f"--megatron-{name}={degree}: must be at least 1. Leave it out for 1."
        for name, size in divided_sizes(config):
            if size % tp:
                yield (
                    f"--megatron-tp={tp}: does not divide {name}={size}, which "
                    "tensor-parallel ranks share equally. Choose a divisor."
                )
        if contract.row_parallel_blocks % tp:
            yield (
                f"--megatron-tp={tp}: does not divide row_parallel_blocks="
                f"{contract.row_parallel_blocks}, the blocks that sums over ranks are made of. Choose a "
                "power of two, or a larger --row-parallel-blocks."
            )
        if config.num_hidden_layers % pp:
            yield (
                f"--megatron-pp={pp}: does not divide num_hidden_layers="
                f"{config.num_hidden_layers}. Choose a divisor."
            )
        if world_size % (tp * pp * cp):
            yield (
                f"world_size={world_size}: no multiple of {tp * pp * cp} = --megatron-tp {tp} x "
                f"--megatron-pp {pp} x --megatron-cp {cp}. Start that many ranks, or a multiple "
                "(--actor-num-ranks-per-node, or with GPUs --actor-num-gpus-per-node)."
            )
        targets = contract.adapter.targets if contract.adapter is not None else ()
        for name in sorted(set(targets) - ADAPTED):
            yield (
                f"--lora-target-modules: --train-backend megatron has no adapters of {name} yet. Name "
                f"some of {', '.join(sorted(ADAPTED))}, or choose --train-backend fsdp."
            )
        if self.sequence_parallel and tp == 1:
            yield (
                "--megatron-sequence-parallel: shares tokens among tensor-parallel ranks, and there is "
                "one (--megatron-tp=1). Leave it out."
            )
        if ep == 1:
            return
        if not experts:
            yield f"--megatron-ep={ep}: this model has no experts. Leave it out."
        elif experts % ep:
            yield (
                f"--megatron-ep={ep}: does not divide {family_of(config).num_experts}={experts}. "
                "Choose a divisor."
            )
        if world_size // (tp * pp) % ep:
            yield (
                f"--megatron-ep={ep}: does not divide the {world_size // (tp * pp)} ranks "
                f"of a pipeline stage that hold different tokens (world_size={world_size}). Choose a "
                "divisor, or start more ranks."
            )
        if tp > 1 and not self.sequence_parallel:
            yield (
                f"--megatron-ep={ep}: with --megatron-tp {tp} it needs --megatron-sequence-parallel, or "
                "every token would reach its experts several times. Add it."
            )
