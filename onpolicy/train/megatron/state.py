"""Megatron's distributed checkpoints of model and optimizer: sharded, loadable under other layouts."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from onpolicy.errors import CheckpointError
from onpolicy.train import distributed
from onpolicy.train.megatron.adapters import sharded_adapters
from onpolicy.train.megatron.weights import first_layer, global_name, unwrap
from onpolicy.train.state import IndexReader, create_missing_moments

_METADATA = {
    # One tensor a layer: a weight frozen in some layers has no moments for a tensor of all layers.
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


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
        with _replaced(filesystem_async, "_results_queue", Queue()):
            dist_checkpointing.save(state, str(directory), content_metadata=_METADATA)
    except CheckpointingException as error:
        raise CheckpointError(str(error)) from error


def read_tensors(
    directory: Path, model: DistributedDataParallel, optimizer: MegatronOptimizer
) -> None:
    """Read back, in place, what `write_tensors` wrote; collective."""
    try:
        # Megatron's own reader would run code in an index, even if the index was checked before.
        with _replaced(torch_strategy, "_get_filesystem_reader", _index_reader):
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


@contextmanager
def _replaced(holder: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a module or another object within this context."""
    own = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, own)


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
                    stack.enter_context(_replaced(padded, "numel_unpadded", size))
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
