"""Micro-batches through Megatron's pipeline schedules, with or without gradients; and the broadcast of
results from the last stage of a pipeline.

On a machine without CUDA they need the stand-in (`compat/megatron_on_cpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor, nn

from onpolicy.models.policy import PackedTokens, Values
from onpolicy.ops.log_probs import Scores
from onpolicy.training.megatron.config import AlignedConfig
from onpolicy.training.megatron.gpt_model import packed_forward

T = TypeVar("T")


def num_stages() -> int:
    """Return the number of pipeline stages."""
    return int(parallel_state.get_pipeline_model_parallel_world_size())


def config_of(model: nn.Module) -> AlignedConfig:
    """Return the configuration that all modules of a stage share."""
    config: AlignedConfig = get_model_config(model)
    return config


def share_vectors(
    vectors: Sequence[Tensor],
    sizes: Sequence[int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return the last stage's vectors of the given sizes, on every stage."""
    if num_stages() == 1:
        return list(vectors)
    is_last = parallel_state.is_pipeline_last_stage()
    room = torch.empty(sum(sizes), device=device, dtype=dtype)
    flat = torch.cat(list(vectors)) if is_last else room
    dist.broadcast(flat, _last(), group=parallel_state.get_pipeline_model_parallel_group())
    return list(flat.split(list(sizes)))


def share_object(value: T) -> T:
    """Return the last stage's value, on every stage."""
    if num_stages() == 1:
        return value
    values = [value]
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(values, _last(), group=group)
    return values[0]


def _last() -> int:
    return int(parallel_state.get_pipeline_model_parallel_last_rank())


Loss = Callable[[int, Any], Tensor]
"""(number of the micro-batch, its scores) -> part of a sum over all micro-batches."""


def score(model: nn.Module, batches: Sequence[PackedTokens]) -> list[Any]:
    """Return the scores, or values, of every micro-batch, without gradient, on every rank.

    Ranks of a pipeline, and of tensor and context parallelism, pass the same micro-batches; all ranks
    pass equally many.
    """
    with torch.no_grad():
        results = _run(model, batches, None)
    if num_stages() == 1:
        return results
    kind: Any = Values if get_attr_wrapped_model(model, "has_values") else Scores
    sizes, device = [len(batch.rows) for batch in batches], batches[0].rows.device
    columns = [
        share_vectors(
            [getattr(scores, name) for scores in results],
            sizes,
            device,
            torch.int64 if name == "row_digests" else torch.float32,
        )
        for name in kind._fields
    ]
    return [kind._make(scores) for scores in zip(*columns, strict=True)]


def accumulate_gradients(model: nn.Module, batches: Sequence[PackedTokens], loss: Loss) -> None:
    """Add the gradients of the sum of `loss` over all micro-batches of all data-parallel ranks.

    `model` is wrapped in DistributedDataParallel; if its configuration has Megatron's
    `finalize_model_grads`, gradients are complete on return. `loss` is called on the last pipeline
    stage, equally on all tensor- and context-parallel ranks. Batches as in `score`.
    """
    _run(model, batches, loss)


def _run(model: nn.Module, batches: Sequence[PackedTokens], loss: Loss | None) -> list[Any]:
    """Run Megatron's schedule; return the last stage's results, and nothing on other stages."""

    def forward_step(
        numbered: Iterator[tuple[int, PackedTokens]], model: nn.Module
    ) -> tuple[Any, Callable[[Any], tuple[Tensor, Tensor, Any]]]:
        number, batch = next(numbered)

        def finish(scores: Any) -> tuple[Tensor, Tensor, Any]:
            first, *_ = scores
            total = first.new_zeros(()) if loss is None else loss(number, scores)
            # The loss is a sum of weighted tokens: a count of 0 keeps Megatron from dividing it.
            tokens = torch.zeros((), dtype=torch.int, device=first.device)
            return total, tokens, scores._make(x.detach() for x in scores)

        return packed_forward(model, batch), finish

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=enumerate(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=1,  # of no effect with variable_seq_lengths, like micro_batch_size
        micro_batch_size=1,
        forward_only=loss is None,
    )
    return results
