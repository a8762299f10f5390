"""Attachment of a recorder to the operators of a Hugging Face model, and its removal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onpolicy.explain.taps.evidence import Scope
from onpolicy.explain.taps.recorder import INPUTS, Call, Recorder
from onpolicy.explain.taps.row_keys import prefix_keys
from onpolicy.models.expert_layers import AlignedExperts
from onpolicy.models.policy import PackedTokens, PolicyModel
from onpolicy.ops import AttentionLayout, Operators
from onpolicy.ops.row_parallel import RowParallel


def tapped(operators: Operators, recorder: Recorder) -> Operators:
    """Return operators whose calls are recorded; calls inside an operator are not."""
    return cast(Operators, _Tapped(operators, recorder))


class _Tapped:
    def __init__(self, operators: Operators, recorder: Recorder):
        self._operators, self._recorder = operators, recorder
        for name in INPUTS:
            setattr(self, name, partial(recorder.run, name, getattr(operators, name)))

    @property
    def of_rounded(self) -> Operators:
        others = self._operators.of_rounded
        return (
            cast(Operators, self) if others is self._operators else tapped(others, self._recorder)
        )

    def mix_few(self, *_: Any) -> None:
        """Do nothing: all operators are recorded, so none may be fused with others."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)


@contextmanager
def watched(
    model: nn.Module,
    recorder: Recorder,
    rows_of: Callable[[Any, Any], tuple[Tensor, Tensor]],
    hooks: Iterable[RemovableHandle],
) -> Iterator[list[list[Call]]]:
    """Record each forward pass of a model; yield a list that grows by the calls of each pass.

    rows_of: (args, kwargs) of a pass -> the arguments of `Recorder.open`. hooks: removed in the
    end.
    """
    passes: list[list[Call]] = []

    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        recorder.open(*rows_of(args, kwargs))

    with ExitStack() as stack:
        for hook in (
            model.register_forward_pre_hook(begin, with_kwargs=True),
            model.register_forward_hook(lambda *_: passes.append(recorder.close())),
            *hooks,
        ):
            stack.callback(hook.remove)
        yield passes


def scopes(decoder: Any, recorder: Recorder) -> list[RemovableHandle]:
    """Hook a decoder so that the recorder knows the running module by its Hugging Face name."""
    hooks = [decoder.get_input_embeddings().register_forward_hook(recorder.add_embedding)]
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
    """Return the scope of a module that sorts its rows by each token's chosen experts: int64 [T,
    k]."""
    return Scope(
        module=name,
        expert_order=chosen.detach().reshape(-1).cpu().sort(stable=True)[1],
        first_block=row_parallel.first_block,
        has_halves=has_halves,
    )


def passes_of(policy: PolicyModel, recorder: Recorder) -> AbstractContextManager[list[list[Call]]]:
    """Apply `watched` to a trainer's model with tapped operators."""

    def rows_of(args: tuple[PackedTokens], _: Any) -> tuple[Tensor, Tensor]:
        return packed_keys(args[0].tokens, args[0].layout), args[0].rows

    return watched(policy, recorder, rows_of, scopes(policy.causal_lm.base_model, recorder))


def packed_keys(tokens: Tensor, layout: AttentionLayout) -> Tensor:
    """Return int64 [T], the keys of a layout's queries over the keys of `tokens`."""
    stored, where = tokens.cpu(), layout.key_rows.cpu()
    lens = zip(where, layout.query_lens, layout.key_lens, strict=True)
    found = (prefix_keys(stored[rows[:end]].tolist())[end - n :] for rows, n, end in lens)
    return torch.tensor([key for keys in found for key in keys])
