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


def install(contract: NumericsContract) -> None:
    def after_load(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
        require_tied(runner.model)
        watch_loads(runner.model, rounds=not contract.is_aligned)
        return result

    registry.hook(TARGET, after_load, "after")


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
    parameters = {**dict(model.named_parameters()), **held_tensors(model)}
    for name, tensor in arrived.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.dim() != tensor.dim() or parameter.itemsize == 1:
            continue
        expected = shard(tensor, parameter, rank())
        stored = parameter.data[tuple(map(slice, expected.shape))]
        dtype = stored.dtype if rounds else torch.promote_types(stored.dtype, expected.dtype)
        if not torch.equal(stored.to(dtype), expected.to(stored.device, dtype)):
            raise WeightSyncError(
                f"parameter={name}: the engine does not hold the bits that were pushed to it. Its "
                "weights are partly new and partly old; restart the engine."
            )
