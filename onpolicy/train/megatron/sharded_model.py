"""A model under Megatron-core: its schedules, gradient buffers and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.adapters import FactorValues
from onpolicy.models.lora.peft_format import first_factors
from onpolicy.models.operator_shapes import operator_shapes
from onpolicy.models.policy import PackedTokens
from onpolicy.models.value_head import Values
from onpolicy.ops import Operators
from onpolicy.ops.log_probs import Head, Scores
from onpolicy.train import distributed
from onpolicy.train.batch import WeighedBatch
from onpolicy.train.engine import Check, Loss, ShardedModel
from onpolicy.train.megatron.layout import MegatronLayout
from onpolicy.train.megatron.masters import Masters
from onpolicy.train.megatron.model import build_model
from onpolicy.train.megatron.optimizer import (
    OrderedGradients,
    gradient_norm,
    make_optimizer,
    orders_gradients,
    use_settings,
    with_gradients,
)
from onpolicy.train.megatron.schedule import (
    accumulate_gradients,
    config_of,
    num_stages,
    score,
    share_object,
    share_vectors,
)
from onpolicy.train.megatron.state import read_tensors, write_tensors
from onpolicy.train.megatron.weights import export_buckets, fill_adapters, load_hf_weights
from onpolicy.weights.digest import WeightBucket, WeightPart


class MegatronModel(ShardedModel):
    """A model under tensor, sequence, pipeline, context, expert and data parallelism."""

    def __init__(
        self,
        config: TrainConfig,
        contract: NumericsContract,
        layout: MegatronLayout,
        path: str,
        operators: Operators,
        *,
        trained: bool,
        has_values: bool = False,
        rounds: bool = False,
    ):
        self.config, self.operators = config, operators
        contract = contract if rounds else contract.unrounded
        self.adapter = contract.adapter if trained and not has_values else None
        self.device = distributed.device(contract.device)
        self.ordered: OrderedGradients | None = None
        self.optimizer: MegatronOptimizer | None = None
        self.module = self._load(path, contract, layout, has_values)
        if self.adapter is not None:
            fill_adapters(self.module, first_factors(config.lora.lora_adapter, config.seed))
        if trained:
            self.module = with_gradients(self.module, config)
            if config.plan.is_rank_invariant and orders_gradients(layout):
                self.ordered = OrderedGradients(self.module)
            self.optimizer = make_optimizer(self.module, config, getattr(torch, contract.dtype))
            use_settings(self.optimizer, config)
        self.masters = Masters(self.module, contract.weight_format, trained=trained)

    def _load(
        self, path: str, contract: NumericsContract, layout: MegatronLayout, has_values: bool
    ) -> nn.Module:
        trust = self.config.model.trust_remote_code
        hf_config = load_config(path, trust, context=contract.context)
        # A teacher's sizes may differ from the policy's, which the contract holds.
        shapes = operator_shapes(ModelFacts(hf_config, trust), contract.row_parallel_blocks)
        contract = replace(contract, shapes=shapes, adapter=self.adapter)
        model = build_model(
            hf_config, contract, self.operators, layout, self.device, has_values=has_values
        )
        load_hf_weights(model, path)
        return model

    def use(self, operators: Operators) -> None:
        self.operators = operators
        config_of(self.module).operators = operators

    def score(self, batches: Sequence[PackedTokens]) -> list[Any]:
        with self.as_it_is():
            return score(self.module, batches)

    def fill_adapters(self, values: FactorValues) -> None:
        fill_adapters(self.module, values)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()  # it may hold float32 copies

    def head(self) -> Head:
        head: Head = get_attr_wrapped_model(self.module, "head")()
        return head.holding([None if x is None else x.detach() for x in head.tensors])

    def accumulate_gradients(
        self, batches: Sequence[WeighedBatch], loss: Loss, check: Check | None
    ) -> tuple[list[dict[str, float]], list[Tensor]]:
        packed = [batch.packed for batch in batches]
        if check is not None and num_stages() > 1:
            # A pipeline runs backward passes before the last forward pass, and only its last stage
            # has log-probabilities, so a separate forward pass compares them first.
            for scores, batch in zip(self.score(packed), batches, strict=True):
                check(scores.log_probs, batch, scores.entropy, scores.drawn)
            check = None
        metrics: list[dict[str, float]] = []
        train_log_probs: list[Tensor] = []

        def loss_of(number: int, scores: Scores | Values) -> Tensor:
            batch = batches[number]
            if self.ordered is not None and number:
                self.ordered.take()  # the previous micro-batch, whose backward pass is done
            train_log_probs.append(scores[0].detach())
            if check is not None:
                assert not isinstance(scores, Values)  # a critic has no log-probabilities
                check(scores.log_probs, batch, scores.entropy, scores.drawn)
            total, found = loss(scores, batch)
            metrics.append({name: float(value) for name, value in found.items()})
            return total

        self.drop_gradients()
        if self.ordered is not None:
            self.ordered.start()
        accumulate_gradients(self.module, packed, loss_of)
        sizes = [len(batch.mask) for batch in batches]
        shared = share_vectors(train_log_probs, sizes, self.device)
        return share_object(metrics), shared

    def drop_gradients(self) -> None:
        self.module.zero_grad_buffer()  # type: ignore[operator]

    def clip_gradients(self) -> float:
        assert self.optimizer is not None
        self.optimizer.prepare_grads()
        norm = gradient_norm(self.optimizer, self.operators)
        limit = self.config.trainer.clip_grad
        for part in self.optimizer.chained_optimizers:
            if limit and (parameters := part.get_parameters()):
                clip_grad_by_total_norm_fp32(parameters, limit, norm)
        return norm

    def take_step(self, rate: float) -> None:
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.masters.swap()
        self.optimizer.step_with_ready_grads()
        self.optimizer.zero_grad()
        self.masters.round()

    def weight_buckets(
        self,
        max_bytes: int,
        part: WeightPart = "all",
        ranks: Collection[int] = (0,),
        masters: bool = False,
    ) -> Iterator[WeightBucket]:
        held = self.masters.beside if masters else {}
        return export_buckets(self.module, max_bytes, part, ranks, held)

    def optimizer_tensors(self) -> list[Tensor]:
        parts = self.optimizer.chained_optimizers if self.optimizer is not None else ()
        kept = [*self.masters.beside.values()]
        for optimizer in (part.optimizer for part in parts):
            kept += [weight for group in optimizer.param_groups for weight in group["params"]]
            kept += [
                tensor
                for state in optimizer.state.values()
                for tensor in state.values()
                if isinstance(tensor, Tensor)
            ]
        weights = {tensor.untyped_storage()._cdata for tensor in self.module.parameters()}
        return [tensor for tensor in kept if tensor.untyped_storage()._cdata not in weights]

    def gradient_buffers(self) -> list[Tensor]:
        if self.optimizer is None:
            return []
        buffers = self.module.buffers + self.module.expert_parallel_buffers  # type: ignore[operator]
        return [buffer.grad_data for buffer in buffers]

    def write_tensors(self, directory: Path) -> None:
        assert self.optimizer is not None
        with self.masters.in_place():
            write_tensors(directory, self.module, self.optimizer)

    def read_tensors(self, directory: Path) -> None:
        assert self.optimizer is not None
        read_tensors(directory, self.module, self.optimizer)
        use_settings(self.optimizer, self.config)
        self.masters.round()

    def around_operators(
        self, around: Callable[[Operators], Operators]
    ) -> AbstractContextManager[None]:
        return config_of(self.module).around_operators(around)
