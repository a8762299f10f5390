"""Check that the weights an engine holds are, bit for bit, the ones that were pushed to it.

SGLang answers "Success" when its loader returned; an unknown name is only logged. Every load is
watched here: the arriving tensors are hashed under their Hugging Face names, and where the model
keeps a parameter of that name, the stored bits are compared with the ones that arrived. The digest
of the last push is reported (see status.py) and the trainer compares it with its own. A tied output
projection has no tensor of its own to arrive: some of SGLang's models have one all the same, and
leave it empty (Qwen3MoeForCausalLM).

Of a tensor may arrive only what changed since the last push (`onpolicy/weights/changes.py`). It is put
into a copy of the whole, of which tensor-parallel ranks hold shards, and goes the same way from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch

from onpolicy.contract import NumericsContract
from onpolicy.errors import ContractError, WeightSyncError
from onpolicy.weights.changes import restored
from onpolicy.weights.digest import WeightDigest
from sglang_patches import registry
from sglang_patches.engine_experts import held_tensors
from sglang_patches.engine_ranks import gathered, rank, shard

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FLAT_TARGET = (
    "sglang.srt.model_executor.model_runner_components.weight_updater."
    "WeightUpdater._update_weights_from_flattened_bucket"
)


def install(contract: NumericsContract) -> None:
    def after_load(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
        require_tied(runner.model)
        watch_loads(runner.model, rounds=not contract.is_aligned)
        return result

    registry.hook(TARGET, after_load, "after")
    registry.hook(FLAT_TARGET, _load_here, "around")


def _load_here(original: Any, updater: Any, flattened_tensor_bucket_dict: dict[str, Any]) -> Any:
    """Copy a bucket of bytes to the engine's device in one piece; SGLang would read it in place,
    from a host's memory or another GPU's, tensor by tensor."""
    data = flattened_tensor_bucket_dict["flattened_tensor"].to(updater.device)
    return original(updater, {**flattened_tensor_bucket_dict, "flattened_tensor": data})


def watch_loads(model: Any, *, rounds: bool) -> None:
    """Check and report everything that `model` loads from now on.

    `rounds`: a stock engine may hold a tensor in a narrower dtype than the pushed one.
    """
    held = HeldWeights(model, rounds=rounds)
    load_weights, registry.report["weights"] = model.load_weights, held.proof

    def watched(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        arrived: dict[str, torch.Tensor] = {}

        def watch() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in restored(weights, held.bases()):
                held.arrived.add(name, tensor)
                arrived[name] = tensor
                yield name, tensor

        loaded = load_weights(watch(), *args, **kwargs)
        held.take(arrived)
        return loaded

    model.load_weights = watched


class HeldWeights:
    """The weights pushed to a model, and a check that it still holds their bits.

    A push brings the weights trained since the last one. Untrained weights came with the first
    push, and are hashed again in place whenever a push is verified.
    """

    def __init__(self, model: Any, *, rounds: bool):
        self._model, self._rounds = model, rounds
        self.arrived, self._shards = WeightDigest(), WeightDigest()
        self._whole: dict[str, torch.Tensor] = {}
        """Tensors without memory: the dtype and the shape of each pushed tensor."""
        self._fresh: set[str] = set()
        self._proof = self.arrived.hexdigest()

    def take(self, arrived: dict[str, torch.Tensor]) -> None:
        """Record loaded tensors. Raises WeightSyncError if the model holds other bits."""
        parameters = self._parameters(arrived)
        if (hidden := arrived.keys() - parameters.keys()) and not self._rounds:
            raise WeightSyncError(
                f"parameter={min(hidden)}: the engine holds nothing of this name, so it cannot be "
                "compared with what was pushed. Choose a supported architecture (docs/architectures.md)."
            )
        for name, stored, tensor in _pairs(arrived, parameters):
            _require_same(name, stored, tensor, self._rounds)
            self._whole[name] = arrived[name].to("meta")
            if tensor is not arrived[name]:
                self._shards.add(name, tensor)
        self._fresh |= arrived.keys()

    def bases(self) -> Callable[[str], torch.Tensor]:
        """Return a function for one load: name -> a copy of the whole tensor that is held. Its call is
        collective, and raises WeightSyncError if the model does not hold the tensor as it was pushed."""

        @cache  # once for all of a load's tensors, since it walks through the whole model
        def parameters() -> dict[str, torch.Tensor]:
            return self._parameters(self._whole)

        def base(name: str) -> torch.Tensor:
            like, parameter = self._whole.get(name), parameters().get(name)
            if like is None or parameter is None or parameter.dim() != like.dim():
                raise WeightSyncError(
                    f"parameter={name}: changes of it were pushed, and the engine does not hold all of "
                    "it under this name. Leave out --sparse-weight-sync."
                )
            return gathered(parameter.data, like.shape).to(like.dtype)

        return base

    def _parameters(self, names: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """Return the model's own tensors, if possible by the names under which they are pushed."""
        parameters = held_tensors(self._model)
        if not names.keys() <= parameters.keys():
            parameters = {**dict(self._model.named_parameters()), **parameters}
        # SGLang's transformers backend holds some models under names of its own.
        if mapper := getattr(self._model, "weight_mapper", None):
            held = {name: mapper._map_name(name) for name in names.keys() - parameters.keys()}
            parameters |= {name: parameters[own] for name, own in held.items() if own in parameters}
        return parameters

    def proof(self) -> str:
        """Return the digest of all pushed weights; in its place a text that names weights which the
        model no longer holds or, if it is aligned, does not expose."""
        if self._fresh:
            # Weights that were not pushed anew must still have their old bits.
            changed = self._changed(self.arrived.hashes().keys() - self._fresh)
            self._fresh.clear()
            said = f"changed since it was pushed: {', '.join(changed)}"
            self._proof = said if changed else self.arrived.hexdigest()
        return self._proof

    def _changed(self, names: Iterable[str]) -> list[str]:
        """Return the names from earlier pushes whose bits have changed."""
        before, now = {**self.arrived.hashes(), **self._shards.hashes()}, WeightDigest()
        kept = {name: self._whole[name] for name in names if name in self._whole}
        for name, stored, like in _pairs(kept, self._parameters(kept)):
            now.add(name, stored.to(like.dtype))
        found = now.hashes()
        return sorted(
            name
            for name in names
            if (found[name] != before[name] if name in found else not self._rounds)
        )


def _pairs(
    tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the name, the model's own tensor, and this rank's shard of each pushed tensor.

    Tensors that SGLang's own models fuse have other names and are skipped, as are 8-bit
    parameters, which SGLang quantised on loading and which hold other bits by design.
    """
    for name, tensor in tensors.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.dim() != tensor.dim() or parameter.itemsize == 1:
            continue
        expected = shard(tensor, parameter, rank())
        yield name, parameter.data[tuple(map(slice, expected.shape))], expected


def require_tied(model: torch.nn.Module) -> None:
    """Raise ContractError if an output projection should be the embedding and holds something else."""
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return
    weights = {
        kind: getattr(module, "weight", None)
        for name, module in model.named_modules(remove_duplicate=False)
        if (kind := name.rpartition(".")[2]) in ("lm_head", "embed_tokens")
    }
    head, embedding = weights.get("lm_head"), weights.get("embed_tokens")
    if head is None or embedding is None or head.dtype != embedding.dtype:
        return
    rows = min(len(head), len(embedding))  # what pads a vocabulary need not be alike
    if not torch.equal(head[:rows], embedding[:rows]):
        raise ContractError(
            f"tie_word_embeddings=True: SGLang's {type(model).__name__} has an output projection of its "
            "own, which nothing fills, so its tokens would be noise. Give aligned operators "
            "(--true-on-policy-mode), whose engine runs the trainer's model, or a checkpoint whose "
            "output projection is not tied."
        )


def _require_same(name: str, stored: torch.Tensor, expected: torch.Tensor, rounds: bool) -> None:
    if stored.data_ptr() == expected.data_ptr() and stored.numel():
        raise WeightSyncError(
            f"parameter={name}: SGLang's loader keeps the memory that it was pushed in, which the "
            "next push overwrites. Choose --weight-sync disk."
        )
    dtype = stored.dtype if rounds else torch.promote_types(stored.dtype, expected.dtype)
    if not _same_bits(stored.to(dtype), expected.to(stored.device, dtype)):
        raise WeightSyncError(
            f"parameter={name}: the engine does not hold the bits that were pushed to it. Its "
            "weights are partly new and partly old; restart the engine."
        )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype are the same bytes; compared as 8-byte words, which
    is much faster than comparing numbers."""
    if a.shape != b.shape:
        return False
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]
    whole = all(data.storage_offset() % 8 == len(data) % 8 == 0 for data in flat)
    return torch.equal(*(data.view(torch.int64 if whole else torch.uint8) for data in flat))
