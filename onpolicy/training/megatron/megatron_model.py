"""A model under Megatron-core, with its schedules, gradient buffers, optimizer and checkpoints.

The checkpoints are Megatron's distributed ones: sharded, and loadable under other layouts.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.common import (
    COMMON_STATE_FNAME,
    TorchCommonLoadStrategy,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import CheckpointError
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.adapters import FactorValues
from onpolicy.models.lora.peft_format import first_factors
from onpolicy.models.policy import PackedTokens, Values
from onpolicy.models.size import operator_shapes
from onpolicy.ops import Operators
from onpolicy.ops.log_probs import Head, Scores
from onpolicy.training import distributed
from onpolicy.training.batch import MicroBatch
from onpolicy.training.engine import Check, Loss, ShardedModel
from onpolicy.training.megatron.config import replaced
from onpolicy.training.megatron.gpt_model import build_model
from onpolicy.training.megatron.megatron_adapters import sharded_adapters
from onpolicy.training.megatron.megatron_optimizer import (
    Masters,
    OrderedGradients,
    gradient_norm,
    make_optimizer,
    orders_gradients,
    use_settings,
    with_gradients,
)
from onpolicy.training.megatron.megatron_weights import (
    export_buckets,
    fill_adapters,
    first_layer,
    global_name,
    load_hf_weights,
    unwrap,
)
from onpolicy.training.megatron.rank_layout import MegatronLayout
from onpolicy.training.megatron.schedule import (
    accumulate_gradients,
    config_of,
    num_stages,
    score,
    share_object,
    share_vectors,
)
from onpolicy.training.state import IndexReader, create_missing_moments
from onpolicy.weights.digest import WeightBucket, WeightPart

_METADATA = {
    # One tensor a layer: a weight frozen in some layers has no moments for a tensor of all layers.
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


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
        self, batches: Sequence[MicroBatch], loss: Loss, check: Check | None
    ) -> tuple[list[dict[str, float]], list[Tensor]]:
        packed = [batch.packed for batch in batches]
        if check is not None and num_stages() > 1:
            # A pipeline runs backward passes before the last forward pass, and only its last stage
            # has log-probabilities, so a separate forward pass compares them first.
            for scores, batch in zip(self.score(packed), batches, strict=True):
                check(scores.log_probs, batch, scores.drawn, scores.row_digests)
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
                check(scores.log_probs, batch, scores.drawn, scores.row_digests)
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
        config = config_of(self.module)
        return replaced(config, "operators", around(config.operators))


def write_tensors(
    directory: Path, model: DistributedDataParallel, optimizer: MegatronOptimizer
) -> None:
    """Write weights and moments; collective.

    A rank waits until its files are written, so an in-process queue collects the results. Megatron
    would start a process for asynchronous saving, which imports PyTorch and stays alive.
    """
    distributed.run_on_rank_zero(directory.mkdir)
    try:
        state = _state(model, optimizer, is_loading=False)
        with replaced(filesystem_async, "_results_queue", Queue()):
            dist_checkpointing.save(state, str(directory), content_metadata=_METADATA)
    except CheckpointingException as error:
        raise CheckpointError(str(error)) from error


def read_tensors(
    directory: Path, model: DistributedDataParallel, optimizer: MegatronOptimizer
) -> None:
    """Read back, in place, what `write_tensors` wrote; collective."""
    try:
        # Megatron's own reader would run code in an index, even if the index was checked before.
        with replaced(torch_strategy, "_get_filesystem_reader", _index_reader):
            state = dist_checkpointing.load(
                _state(model, optimizer, is_loading=True),
                str(directory),
                sharded_strategy=TorchDistLoadShardedStrategy(),
                common_strategy=_CommonStrategy(),
            )
    except CheckpointingException as error:
        raise CheckpointError(str(error)) from error
    # With adapters, the checkpoint lacks the frozen weights, which --hf-checkpoint holds.
    model.module.load_state_dict(state["model"], strict=unwrap(model).config.adapter is None)
    _load_optimizer(optimizer, state["optimizer"])


def _index_reader(path: str | Path, cache_metadata: bool = False) -> IndexReader:
    return IndexReader(path)


class _CommonStrategy(TorchCommonLoadStrategy):
    """A loader that runs no code even if TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set."""

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        file = Path(checkpoint_dir) / COMMON_STATE_FNAME
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # its message suggests running the code
            raise CheckpointError(f"{file.name} holds more than data") from error


def _state(
    model: DistributedDataParallel, optimizer: MegatronOptimizer, *, is_loading: bool
) -> dict[str, Any]:
    _create_missing_moments(optimizer)
    metadata = dict(_METADATA)  # Megatron adds its process groups to it
    policy = unwrap(model)
    if policy.config.adapter is not None:
        weights = sharded_adapters(policy, partial(global_name, first=first_layer(policy)))
    else:
        named = model.module.sharded_state_dict(metadata=metadata)
        # Without the layers' empty extra states: pickles, which a loader would run.
        weights = {name: x for name, x in named.items() if not isinstance(x, ShardedObject)}
    with _padding_counted(optimizer):
        moments = optimizer.sharded_state_dict(weights, is_loading, metadata=metadata)
    return {"model": weights, "optimizer": moments}


@contextmanager
def _padding_counted(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Count the padding of buckets as data within this context. A parameter's offset in a buffer
    includes the padding, but Megatron reads from a copy without it: behind a padded bucket, as of a
    tied embedding, it would read its neighbours' numbers."""
    with ExitStack() as stack:
        for part in optimizer.chained_optimizers:
            for buffer in part.buffers if isinstance(part, DistributedOptimizer) else ():
                sizes = [(bucket, bucket.grad_data.numel()) for bucket in buffer.buckets]
                for padded, size in [(buffer, buffer.numel), *sizes]:
                    stack.enter_context(replaced(padded, "numel_unpadded", size))
        yield


def _create_missing_moments(optimizer: MegatronOptimizer) -> None:
    """Create PyTorch AdamW's moments, which Megatron's distributed optimizer requires to exist."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            create_missing_moments(part.optimizer)


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    parts = optimizer.chained_optimizers
    states = [state] if len(parts) == 1 else [state[i] for i in range(len(parts))]
    for part, own in zip(parts, states, strict=True):
        if isinstance(part, DistributedOptimizer):
            _load_distributed(part, own)
        else:
            part.load_state_dict(own)


def _load_distributed(optimizer: DistributedOptimizer, state: dict[str, Any]) -> None:
    """Load the state but keep the step counts of PyTorch's AdamW, which Megatron ignores, and which
    would share one tensor."""
    sharded = state.pop("param_state")
    optimizer.load_state_dict(state)
    own = optimizer.optimizer.state
    steps = {parameter: own[parameter].pop("step", None) for parameter in own}
    optimizer.load_parameter_state_from_fully_reshardable(sharded)
    for parameter, step in steps.items():
        if step is not None:
            own[parameter]["step"] = step.clone()
