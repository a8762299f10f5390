"""Puts a recorder behind a model's operators, and takes it away again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from onpolicy.models.experts import AlignedExperts
from onpolicy.models.policy import PackedTokens, PolicyModel
from onpolicy.ops import AttentionLayout, Operators
from onpolicy.ops.row_parallel import RowParallel
from onpolicy.taps.recorder import INPUTS, Call, Recorder
from onpolicy.taps.rows import prefix_keys
from onpolicy.taps.scope import Scope


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
def scopes(decoder: Any, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder which module of a decoder, by its Hugging Face name, is running."""
    with ExitStack() as stack:
        for name, module in decoder.named_modules():
            if name:
                for handle in _scope_hooks(module, name, recorder):
                    stack.callback(handle.remove)
        handle = decoder.get_input_embeddings().register_forward_hook(record_embedding(recorder))
        stack.callback(handle.remove)
        yield


def _scope_hooks(module: nn.Module, name: str, recorder: Recorder) -> Iterator[Any]:
    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        scope = Scope(module=name)
        if isinstance(module, AlignedExperts):
            chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            scope = experts_scope(name, chosen, module.row_parallel, module.own_gate is None)
        recorder.enter(scope)

    yield module.register_forward_pre_hook(enter, with_kwargs=True)
    yield module.register_forward_hook(lambda *_: recorder.leave(), always_call=True)


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
def behind_operators(model: PolicyModel, recorder: Recorder) -> Iterator[None]:
    """Record what the modules of a trainer's model call, while the recorder is open."""
    with ExitStack() as stack:
        for module in model.modules():
            if (own := getattr(module, "operators", None)) is not None:
                stack.callback(setattr, module, "operators", own)
                module.operators = tapped(own, recorder)  # type: ignore[assignment]
        stack.enter_context(scopes(model.causal_lm.base_model, recorder))
        yield


@contextmanager
def recording(model: PolicyModel, recorder: Recorder) -> Iterator[list[list[Call]]]:
    """Record every forward pass of a trainer's model; yields what grows by the calls of each."""
    passes: list[list[Call]] = []

    def begin(_: nn.Module, args: tuple[PackedTokens]) -> None:
        batch = args[0]
        recorder.open(packed_keys(batch.tokens, batch.layout), batch.rows)

    with behind_operators(model, recorder), ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(begin).remove)
        end = model.register_forward_hook(lambda *_: passes.append(recorder.close()))
        stack.callback(end.remove)
        yield passes


def packed_keys(tokens: Tensor, layout: AttentionLayout) -> Tensor:
    """int64 [T]: of the queries of a layout whose keys are those of `tokens`."""
    stored, where = tokens.cpu(), layout.key_rows.cpu()
    lens = zip(where, layout.query_lens, layout.key_lens, strict=True)
    found = (prefix_keys(stored[rows[:end]].tolist())[end - n :] for rows, n, end in lens)
    return torch.tensor([key for keys in found for key in keys])
