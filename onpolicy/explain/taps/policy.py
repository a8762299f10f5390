"""Puts a recorder behind the operators of a Hugging Face model, and takes it away again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onpolicy.explain.taps.recorder import INPUTS, Call, Recorder
from onpolicy.explain.taps.rows import prefix_keys
from onpolicy.explain.taps.scope import Scope
from onpolicy.models.experts import AlignedExperts
from onpolicy.models.policy import PackedTokens, PolicyModel
from onpolicy.ops import AttentionLayout, Operators
from onpolicy.ops.row_parallel import RowParallel


def tapped(operators: Operators, recorder: Recorder) -> Operators:
    """Operators whose calls are recorded; what an operator calls inside itself is not."""
    return cast(Operators, _Tapped(operators, recorder))


class _Tapped:
    def __init__(self, operators: Operators, recorder: Recorder):
        self._operators = operators
        for name in INPUTS:
            setattr(self, name, _watched(name, getattr(operators, name), recorder))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)


def _watched(name: str, right: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    return lambda *args, **kwargs: recorder.run(name, right, args, kwargs)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove these hooks in the end."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def scopes(decoder: Any, recorder: Recorder) -> list[RemovableHandle]:
    """Hook a decoder, so that the recorder knows which module, by its Hugging Face name, is running."""
    hooks = [decoder.get_input_embeddings().register_forward_hook(record_embedding(recorder))]
    for name, module in decoder.named_modules():
        if name:
            hooks += recorder.scoped(module, _scope_of(name, module))
    return hooks


def _scope_of(name: str, module: nn.Module) -> Callable[[Any, Any], Scope]:
    def scope(args: Any, kwargs: Any) -> Scope:
        if not isinstance(module, AlignedExperts):
            return Scope(module=name)
        chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        return experts_scope(name, chosen, module.row_parallel, module.own_gate is None)

    return scope


def experts_scope(name: str, chosen: Tensor, row_parallel: RowParallel, has_halves: bool) -> Scope:
    """The scope of a module that sorts its rows by the experts that each token chose: int64 [T, k]."""
    return Scope(
        module=name,
        expert_order=chosen.detach().reshape(-1).cpu().sort(stable=True)[1],
        first_block=row_parallel.first_block,
        has_halves=has_halves,
    )


def record_embedding(recorder: Recorder) -> Callable[[nn.Module, Any, Tensor], None]:
    """A forward hook of the input embedding."""

    def record(_: nn.Module, args: Any, out: Tensor) -> None:
        if recorder.is_open:
            recorder.add("embed_tokens", "embedding", (), (out,))

    return record


@contextmanager
def passes_of(policy: PolicyModel, recorder: Recorder) -> Iterator[list[list[Call]]]:
    """Let each forward pass of a trainer's model, whose operators are tapped, be one of the recorder's;
    yields what grows by the calls of each."""
    passes: list[list[Call]] = []

    def begin(_: nn.Module, args: tuple[PackedTokens]) -> None:
        batch = args[0]
        recorder.open(packed_keys(batch.tokens, batch.layout), batch.rows)

    hooks = [
        *scopes(policy.causal_lm.base_model, recorder),
        policy.register_forward_pre_hook(begin),
        policy.register_forward_hook(lambda *_: passes.append(recorder.close())),
    ]
    with hooked(hooks):
        yield passes


def packed_keys(tokens: Tensor, layout: AttentionLayout) -> Tensor:
    """int64 [T]: of the queries of a layout whose keys are those of `tokens`."""
    stored, where = tokens.cpu(), layout.key_rows.cpu()
    lens = zip(where, layout.query_lens, layout.key_lens, strict=True)
    found = (prefix_keys(stored[rows[:end]].tolist())[end - n :] for rows, n, end in lens)
    return torch.tensor([key for keys in found for key in keys])
