"""Checks that the weights an engine holds are, bit for bit, the ones that were pushed to it.

SGLang answers "Success" when its loader returned; a name it did not know is only logged. Every load
is watched here: the tensors that arrive are hashed under their Hugging Face names, and where the
model keeps a parameter of that name, the stored bits are compared with the ones that arrived. The
digest of the last push is reported (see status.py) and the trainer compares it with its own. A tied
output projection has no tensor of its own to arrive: some of SGLang's models have one all the same,
and leave it empty (Qwen3MoeForCausalLM).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from onpolicy.contract import NumericsContract
from onpolicy.errors import ContractError, WeightSyncError
from onpolicy.weights.digest import WeightDigest
from sglang_patches import registry
from sglang_patches.experts import held_tensors
from sglang_patches.tensor_parallel import rank, shard

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
    """Bring a bucket of bytes to the engine's device in one piece; SGLang would read it where it lies,
    in a host's memory or another GPU's, tensor by tensor."""
    data = flattened_tensor_bucket_dict["flattened_tensor"].to(updater.device)
    return original(updater, {**flattened_tensor_bucket_dict, "flattened_tensor": data})


def watch_loads(model: Any, *, rounds: bool) -> None:
    """Check and report what `model` loads from now on.

    `rounds`: a stock engine may hold a tensor in a narrower dtype than the one it was pushed in.
    """
    load_weights = model.load_weights
    digest = WeightDigest()
    registry.report["weights"] = digest.hexdigest()

    def watched(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        arrived: dict[str, torch.Tensor] = {}

        def watch() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                digest.add(name, tensor)
                arrived[name] = tensor
                yield name, tensor

        loaded = load_weights(watch(), *args, **kwargs)
        _require_stored(model, arrived, rounds)
        registry.report["weights"] = digest.hexdigest()
        return loaded

    model.load_weights = watched


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


def _require_stored(model: torch.nn.Module, arrived: dict[str, torch.Tensor], rounds: bool) -> None:
    """Compare with the parameters of the same name, or this rank's shards of them.

    What SGLang's own models fuse has other names. One of 8 bits was quantised by SGLang on its way
    in and holds other bits by design.
    """
    parameters = held_tensors(model)
    if not arrived.keys() <= parameters.keys():
        parameters = {**dict(model.named_parameters()), **parameters}
    for name, tensor in arrived.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.dim() != tensor.dim() or parameter.itemsize == 1:
            continue
        expected = shard(tensor, parameter, rank())
        stored = parameter.data[tuple(map(slice, expected.shape))]
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
    """Whether two tensors of one dtype are the same bytes; in words, which takes a fraction of the time
    of comparing numbers."""
    if a.shape != b.shape:
        return False
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]
    whole = all(data.storage_offset() % 8 == len(data) % 8 == 0 for data in flat)
    return torch.equal(*(data.view(torch.int64 if whole else torch.uint8) for data in flat))
