"""A model under FSDP2: weights, gradients and optimizer state are sharded once, and torch DCP writes
them for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.models.align import AlignedLinear
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.adapters import FactorValues
from onpolicy.models.lora.peft_format import first_factors
from onpolicy.models.policy import PackedTokens, PolicyModel, ValueModel
from onpolicy.models.rounded_inputs import round_inputs
from onpolicy.ops import Operators
from onpolicy.ops.log_probs import Head
from onpolicy.training import distributed
from onpolicy.training.batch import MicroBatch
from onpolicy.training.engine import Check, Loss, ShardedModel, recomputes_activations
from onpolicy.training.fsdp.fsdp_optimizer import (
    Masters,
    clip_gradients,
    make_optimizer,
    sum_gradients,
    take_step,
)
from onpolicy.training.fsdp.replicas import Replicas
from onpolicy.training.fsdp.sharding import fill_adapters, gather_buckets, load_sharded_policy
from onpolicy.training.gradient_norm import global_norm, run_in_blocks
from onpolicy.training.loss_scale import LossScale
from onpolicy.training.state import IndexReader, create_missing_moments
from onpolicy.weights.digest import WeightBucket, WeightPart


class FsdpModel(ShardedModel):
    """A model that computes in the contract's dtype, and sums in float32."""

    module: PolicyModel

    def __init__(
        self,
        config: TrainConfig,
        contract: NumericsContract,
        path: str,
        operators: Operators,
        *,
        trained: bool,
        has_values: bool = False,
        rounds: bool = False,
        replicas: Replicas | None = None,
    ):
        self.config, self.replicas = config, replicas
        self.kind = ValueModel if has_values else PolicyModel
        self.dtype: torch.dtype = getattr(torch, contract.dtype)
        self.adapter = contract.adapter if trained and not has_values else None
        contract = contract if rounds else contract.unrounded
        self.module = self._load(path, contract, operators, trained)
        round_inputs(self.module, contract.activation_format, (AlignedLinear,))
        self.masters = Masters(self.module, contract.weight_format, self.dtype)
        if self.adapter is not None:
            self.fill_adapters(first_factors(config.lora.lora_adapter, config.seed))
        in_order = config.plan.is_rank_invariant
        self.turn = sum_gradients(self.module, in_order=in_order, replicas=replicas)
        self.optimizer: torch.optim.AdamW | None = None
        if trained:
            self.loss_scale = LossScale() if self.dtype == torch.float16 else None
            self.optimizer = make_optimizer(
                [held for held in self.masters.held.values() if held.requires_grad],
                config.trainer,
                portable=config.operators.is_portable,
            )

    def _load(
        self, path: str, contract: NumericsContract, operators: Operators, trained: bool
    ) -> PolicyModel:
        trust = self.config.model.trust_remote_code
        return load_sharded_policy(
            path,
            operators,
            self.dtype,
            device=distributed.device(contract.device),
            activation_checkpointing=recomputes_activations(
                self.config.trainer, load_config(path, trust)
            ),
            trust_remote_code=trust,
            row_parallel_blocks=contract.row_parallel_blocks,
            context=contract.context,
            kind=self.kind,
            adapter=self.adapter,
            sees=bool(contract.images),
            trained=trained,
            mesh=None if self.replicas is None else self.replicas.mesh,
        )

    def use(self, operators: Operators) -> None:
        self.module.use(operators)

    def score(self, batches: Sequence[PackedTokens]) -> list[Any]:
        with torch.no_grad(), self.as_it_is():
            scores = [self.module(packed) for packed in batches]
        self._free_gathered_weights()
        return scores

    def fill_adapters(self, values: FactorValues) -> None:
        fill_adapters(self.module, values)

    def head(self) -> Head:
        head = self.module.head()
        return head.holding([None if x is None else _gathered(x, self.dtype) for x in head.tensors])

    def accumulate_gradients(
        self, batches: Sequence[MicroBatch], loss: Loss, check: Check | None
    ) -> tuple[list[dict[str, float]], list[Tensor]]:
        metrics, train_log_probs = [], []
        for batch in batches:
            scores = self.module(batch.packed)
            train_log_probs.append(scores[0].detach())
            if check is not None:
                check(scores.log_probs, batch, scores.drawn, scores.row_digests)
            total, found = loss(scores, batch)
            self.turn.is_filler = batch.is_filler
            total.backward(torch.full_like(total, self.scale))
            if self.module.replay is not None:
                found |= self.module.replay.counts()
            metrics.append({name: float(value) for name, value in found.items()})
        self.turn.finish_sums()
        return metrics, train_log_probs

    def drop_gradients(self) -> None:
        self._free_gathered_weights()
        self._forget_gradients()

    def clip_gradients(self) -> float:
        shards = [
            p.grad.to_local() for p in self.module.parameters() if isinstance(p.grad, DTensor)
        ]
        group = None
        if self.replicas is not None:
            self.replicas.require_equal(shards)
            group = self.replicas.mesh.get_group()
        operators, inverse = self.module.operators, 1 / self.scale
        if inverse != 1:
            run_in_blocks(operators, [(lambda block: block.mul_(inverse), [x]) for x in shards])
        norm = global_norm(shards, operators, group)
        limit = self.config.trainer.clip_grad or math.inf
        clip_gradients(shards, limit, norm, operators)
        return norm

    def take_step(self, rate: float) -> None:
        assert self.optimizer is not None
        self.masters.take_gradients()
        take_step(self.optimizer, self.module.operators, rate)
        self._forget_gradients()
        self.masters.round()

    def _forget_gradients(self) -> None:
        self.module.zero_grad(set_to_none=True)
        self.turn.sums.clear()

    def _free_gathered_weights(self) -> None:
        """Free the root's gathered weights, which FSDP2 keeps after a forward pass for a
        backward pass."""
        assert isinstance(self.module, FSDPModule)
        self.module.reshard()

    def weight_buckets(
        self,
        max_bytes: int,
        part: WeightPart = "all",
        ranks: Collection[int] = (0,),
        masters: bool = False,
    ) -> Iterator[WeightBucket]:
        held = self.masters.beside if masters else {}
        return gather_buckets(self.module, self.dtype, max_bytes, part, ranks, held)

    def optimizer_tensors(self) -> list[Tensor]:
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        moments = [tensor for state in states for tensor in state.values()]
        return [*self.masters.beside.values(), *moments]

    def write_tensors(self, directory: Path) -> None:
        dcp.save(self._tensors(), checkpoint_id=str(directory))

    def read_tensors(self, directory: Path) -> None:
        tensors = self._tensors()
        dcp.load(tensors, storage_reader=IndexReader(directory))
        torch.set_rng_state(tensors["random_state"])
        self.masters.round()

    def _tensors(self) -> dict[str, Tensor]:
        """Return everything that is saved, under flat names: weights, moments and random state."""
        assert self.optimizer is not None
        create_missing_moments(self.optimizer)
        tensors = {"random_state": torch.get_rng_state()}
        for name, parameter in self.masters.held.items():
            if self.adapter is not None and not parameter.requires_grad:
                continue  # frozen, so --hf-checkpoint holds it
            tensors[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def around_operators(
        self, around: Callable[[Operators], Operators]
    ) -> AbstractContextManager[None]:
        return self.module.around_operators(around)


def _gathered(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    sharded = parameter.detach().to(dtype)
    assert isinstance(sharded, DTensor)
    whole: Tensor = sharded.full_tensor()
    return whole
