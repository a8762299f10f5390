"""Loading of a Hugging Face checkpoint into an FSDP2-sharded model, and gathering back.

FSDP2 shards every parameter by its rows. Several stored tensors may make up a parameter (all experts of
a layer are two parameters), so each rank locates a stored tensor in the parameter, on the meta device,
and reads only its own rows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpoint_activations
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PretrainedConfig, PreTrainedModel

from onpolicy.contract import AdapterShape
from onpolicy.errors import ConfigError
from onpolicy.models.empty import give_memory
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.adapters import FactorValues, is_adapters
from onpolicy.models.policy import PolicyModel, ValueHead, ValueModel, empty_policy
from onpolicy.models.stored import stored_tensors
from onpolicy.models.weight_files import VALUE_HEAD, CheckpointReader, matched_model
from onpolicy.ops import Operators
from onpolicy.training import distributed
from onpolicy.weights.digest import WeightBucket, WeightPart, in_buckets

PREFIX = "causal_lm."
_VALUE_HEAD = "value_head."


def load_sharded_policy(
    path: str,
    operators: Operators,
    dtype: torch.dtype,
    *,
    device: torch.device,
    activation_checkpointing: bool,
    trust_remote_code: bool,
    row_parallel_blocks: int,
    context: int | None = None,
    kind: type[PolicyModel] = PolicyModel,
    adapter: AdapterShape | None = None,
    sees: bool = False,
    trained: bool = True,
    mesh: DeviceMesh | None = None,
) -> PolicyModel:
    """Load the weights, each rank its shards: trained weights in float32, all others in `dtype`, in
    which everything is computed. `mesh` has the ranks that share a model; by default all do. sees:
    whether the checkpoint's vision tower is part of the model.

    Adapters are left uninitialised; see `fill_adapters`.
    """
    config = load_config(path, trust_remote_code, context=context)
    tower_of = path if sees else None
    built = operators, trust_remote_code, row_parallel_blocks, kind, adapter, tower_of
    model = empty_policy(config, *built)
    if not trained:
        model.requires_grad_(False)
    buffers = dict(model.named_buffers())
    _shard(model, dtype, activation_checkpointing, mesh)
    give_memory(model, device, buffers)
    load_shards(model, PREFIX, path, config, trust_remote_code)
    if isinstance(model, ValueModel):
        _load_head(model.value_head, path)
    return model


@torch.no_grad()
def fill_adapters(model: PolicyModel, values: FactorValues) -> None:
    """Set the adapters' weights, each rank its rows."""
    for name, parameter in model.named_parameters():
        if is_adapters(name):
            assert isinstance(parameter, DTensor)
            whole = values(name.removeprefix(PREFIX), parameter.shape)
            if whole is not None:
                parameter.to_local().copy_(rows_of(parameter, whole))


def _shard(
    model: PolicyModel,
    dtype: torch.dtype,
    activation_checkpointing: bool,
    mesh: DeviceMesh | None,
) -> None:
    # Inputs are not cast: rotary angles must stay in float32 as they do in the rollout engine.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    model.float()
    for parameter in model.parameters():
        if not parameter.requires_grad:  # FSDP2 would cast before each layer, to the same bits
            parameter.data = parameter.data.to(dtype)
    for layer in model.layers:
        if activation_checkpointing:
            checkpoint_activations(layer)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to a checkpoint, such as a router's correction of its scores."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def gather_buckets(
    model: PolicyModel,
    dtype: torch.dtype,
    max_bytes: int,
    part: WeightPart = "all",
    ranks: Collection[int] = (0,),
    masters: Mapping[str, Tensor] | None = None,
) -> Iterator[WeightBucket]:
    """Yield whole tensors of a part under a checkpoint's names, `max_bytes` at a time.

    Parameters are cast to `dtype`; buffers keep theirs. It is collective: every rank has to iterate
    over all buckets. They are full on `ranks`; other ranks keep nothing that they help to gather.
    `masters`, by parameter name, replace the parameters.
    """
    whole = _checkpoint_tensors(model, dtype, part, masters or {})
    yield from in_buckets((each for each in whole if distributed.rank() in ranks), max_bytes)


def _checkpoint_tensors(
    model: PolicyModel, dtype: torch.dtype, part: WeightPart, masters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    names: set[str] = set()
    for name, tensor in _whole_tensors(model, dtype, part, masters):
        if name.startswith(_VALUE_HEAD):
            yield VALUE_HEAD + name.removeprefix(_VALUE_HEAD), tensor
            continue
        own_name = name.removeprefix(PREFIX)
        if is_adapters(name):  # no checkpoint has them, so nothing renames them
            yield own_name, tensor
            continue
        stored = stored_tensors(model.causal_lm, own_name, tensor)
        if twice := sorted(names & stored.keys()):
            raise ConfigError(
                f"parameter={name}: transformers stores it together with another one as {twice[0]}, so "
                "it cannot be sent by itself. Choose another checkpoint."
            )
        names |= stored.keys()
        yield from stored.items()


def _whole_tensors(
    model: PolicyModel, dtype: torch.dtype, part: WeightPart, masters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors, one at a time; never the model's own memory."""
    for name, parameter in model.named_parameters():
        if part not in ("all", "trained" if parameter.requires_grad else "frozen"):
            continue
        cast = masters.get(name, parameter).detach().to(dtype, copy=True)
        assert isinstance(cast, DTensor)
        yield name, cast.full_tensor()
    if part != "frozen":
        for name, buffer in _stored_buffers(model).items():
            yield name, buffer.clone()


def load_shards(
    model: nn.Module, prefix: str, path: str, config: PretrainedConfig, trust_remote_code: bool
) -> None:
    """Fill this rank's shards of `model`, whose parameters are DTensors named `prefix` plus
    transformers' names, and the buffers that the checkpoint holds.

    Raises ConfigError if the checkpoint is not of this model.
    """
    matched = matched_model(
        path, config, trust_remote_code, of_critic=isinstance(model, ValueModel)
    )
    reader = CheckpointReader(path)
    stored_names = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored_names}
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *buffers.items()):
            if not name.startswith(prefix) or is_adapters(name):
                continue  # a critic's head, or an adapter, which no checkpoint has
            shard = _Shard.of(tensor)
            whole = torch.empty(tensor.shape, device="meta")
            for stored, place in stored_tensors(matched, name.removeprefix(prefix), whole).items():
                found = next((n for n in _names(matched, stored) if n in reader), None)
                if found is None:
                    raise ConfigError(
                        f"{path}: no weights for {stored}. The checkpoint is incomplete."
                    )
                shard.fill(place, partial(reader.read, found))


def _load_head(head: ValueHead, path: str) -> None:
    """Load the value head of a checkpoint; parameters that it lacks become zeros."""
    reader = CheckpointReader(path)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            shard, stored = _Shard.of(parameter), VALUE_HEAD + name
            shard.held.zero_()
            if stored in reader:
                whole = torch.empty(parameter.shape, device="meta")
                shard.fill(whole, partial(reader.read, stored))


def _names(model: PreTrainedModel, name: str) -> Iterator[str]:
    """Yield the names under which a checkpoint may hold a tensor: its own, the name of a tied tensor,
    the base model's."""
    yield name
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    yield from (other for other, source in tied.items() if source == name)
    yield name.removeprefix(f"{model.base_model_prefix}.")


def rows_of(parameter: DTensor, whole: Tensor) -> Tensor:
    """Return this rank's rows of a whole tensor, sharded like `parameter`."""
    shard = _Shard.of(parameter)
    return whole[shard.first : shard.first + len(shard.held)]


@dataclass(frozen=True, slots=True)
class _Shard:
    """This rank's rows of a tensor."""

    held: Tensor
    first: int
    stride: int
    """Number of elements of a row of the whole tensor."""

    @staticmethod
    def of(tensor: Tensor) -> _Shard:
        stride = tensor[0].numel() if tensor.dim() else 1
        if not isinstance(tensor, DTensor):
            return _Shard(tensor, 0, stride)
        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return _Shard(tensor.to_local(), offset[0] if offset else 0, stride)

    def fill(self, place: Tensor, read: Callable[[Sequence[slice]], Tensor]) -> None:
        """Read this rank's rows of a stored tensor that is the view `place` of the whole tensor."""
        first = place.storage_offset() // self.stride
        # Find the axis of the stored tensor, if any, that runs along the rows of the whole one.
        sizes = enumerate(zip(place.shape, place.stride(), strict=True))
        axis = next((d for d, (size, step) in sizes if size > 1 and step == self.stride), None)
        count = 1 if axis is None else place.shape[axis]
        low, high = max(first, self.first), min(first + count, self.first + len(self.held))
        if low >= high:
            return
        index = [slice(None)] * place.dim()
        if axis is not None:
            index[axis] = slice(low - first, high - first)
        mine = place[tuple(index)]
        start = self.held.storage_offset() + mine.storage_offset() - self.first * self.stride
        self.held.as_strided(mine.shape, mine.stride(), start).copy_(read(index))
