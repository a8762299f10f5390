"""Keeps, of every call of an operator, a digest per row of what went in and of what came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from onpolicy.ops.layouts import AttentionLayout, PagedLayout
from onpolicy.ops.row_parallel import RowParallel
from onpolicy.taps.evidence import ATTENTION, Evidence
from onpolicy.taps.rows import by_row, digest, odd_numbers

HEAD = "lm_head"
"""Where what no decoder module calls belongs: the output projection, and what follows it."""

CHOSEN_EXPERTS = "chosen experts"
"""A site beside each `topk`, of its indices alone: whether a router chose otherwise."""

INPUTS = {
    "linear": slice(0, 1),
    "row_parallel_linear": slice(0, 1),
    "grouped_linear": slice(0, 1),
    "grouped_partial_linear": slice(0, 1),
    "attention": slice(0, 1),
    "paged_attention": slice(0, 1),
    "rms_norm": slice(0, 1),
    "layer_norm": slice(0, 1),
    "elementwise": slice(1, 2),
    "gated": slice(1, 3),
    "rotary": slice(0, 2),
    "softmax": slice(0, 1),
    "topk": slice(0, 1),
}
"""Operators that are recorded, and which of their arguments have rows; not weights and settings."""

Site = tuple[str, str, int]
"""(module, operator, which of its calls in a pass). Example: ("layers.0.mlp", "gated", 0)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of an operator; all tensors int64 [n], n: rows of it that have a key."""

    site: Site
    keys: Tensor
    inputs: Tensor
    outputs: Tensor

    store: Tensor | None
    """Of attention: a digest of the keys and values that each row's token sees."""

    shape: tuple[int, ...]
    """Of the first argument."""


@dataclass(slots=True)
class _Scope:
    module: str

    expert_order: Tensor | None = None
    """int64 [T * k]: in experts, the (token, choice) of each row."""

    counts: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Pass:
    keys: Tensor
    head_rows: Tensor
    calls: list[Call] = field(default_factory=list)
    head_done: Counter[str] = field(default_factory=Counter)


class Recorder:
    """Records while a pass is open; a call outside of one costs a comparison."""

    def __init__(self) -> None:
        self.suspect: tuple[Site, int] | None = None
        """The call whose tensors are wanted: that site's last one with a row of that key."""

        self.evidence: Evidence | None = None
        """Them."""

        self.objects: list[Any] = []
        """The call's arguments that are no tensors, each in its place: functions, ranks, layouts."""

        self._pass: _Pass | None = None
        self._scopes: list[_Scope] = []

    def open(self, keys: Tensor, head_rows: Tensor) -> None:
        """A forward pass begins: int64 [T], the keys of its rows, and those that go on to the head."""
        self._pass, self._scopes = _Pass(keys.cpu(), head_rows.cpu()), []

    def close(self) -> list[Call]:
        """It has ended."""
        calls = self._pass.calls if self._pass else []
        self._pass = None
        return calls

    def enter(self, module: str, chosen: Tensor | None = None) -> None:
        """A module begins; chosen: int64 [T, k], the experts that it sorts its rows by, if it does."""
        if self._pass is not None:
            order = (
                None if chosen is None else chosen.detach().reshape(-1).cpu().sort(stable=True)[1]
            )
            self._scopes.append(_Scope(module, order))

    def leave(self) -> None:
        if self._pass is not None and self._scopes:
            self._scopes.pop()

    def run(
        self, name: str, right: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What `right` returns, recorded as the operator `name`."""
        if self._pass is None:
            return right(*args, **kwargs)
        scope = self._scopes[-1] if self._scopes else _Scope(HEAD)
        given = args[INPUTS[name]]
        keys = self._rows(name, given[0], scope)
        inputs = self._digest(given, keys, scope)  # now: an operator may write over them
        store = _store_digest(*args[1:4]) if name in ATTENTION else None
        out = right(*args, **kwargs)
        made = out if isinstance(out, tuple) else (out,)
        call = Call(
            site=(scope.module, _common_name(name, args), scope.counts[name]),
            keys=keys,
            inputs=inputs,
            outputs=self._digest(made, keys, scope),
            store=store,
            shape=tuple(given[0].shape),
        )
        scope.counts[name] += 1
        self._keep(call, name, args, out, scope.expert_order)
        if name == "topk":
            self._keep_choice(call, out[1], scope)
        return out

    def add(
        self, module: str, operator: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Record what a module of an engine's own computed, without an operator of ours."""
        scope = _Scope(module)
        keys = self._rows(operator, outputs[0], scope)
        call = Call(
            site=(module, operator, 0),
            keys=keys,
            inputs=self._digest(inputs, keys, scope) if inputs else keys,
            outputs=self._digest(outputs, keys, scope),
            store=None,
            shape=tuple((inputs or outputs)[0].shape),
        )
        self._keep(call, operator, tuple(inputs), tuple(outputs))

    @property
    def is_open(self) -> bool:
        return self._pass is not None

    @property
    def module(self) -> str:
        """The one that is running."""
        return self._scopes[-1].module if self._scopes else HEAD

    def _rows(self, name: str, x: Tensor, scope: _Scope) -> Tensor:
        """The keys of a call's rows."""
        assert self._pass is not None
        if scope.module != HEAD:
            return self._pass.keys
        done, count = self._pass.head_done[name], x.shape[:-1].numel()
        self._pass.head_done[name] += count
        return self._pass.keys[self._pass.head_rows[done : done + count]]

    def _digest(self, tensors: Sequence[Tensor], keys: Tensor, scope: _Scope) -> Tensor:
        total = torch.zeros(len(keys), dtype=torch.int64)
        for number, x in enumerate(tensors):
            total = total * 0x5851F42D4C957F2D + self._digest_rows(x, len(keys), scope) + number
        return total

    def _digest_rows(self, x: Tensor, count: int, scope: _Scope) -> Tensor:
        order = scope.expert_order
        if order is None or len(x) != len(order):
            return digest(by_row(x, count))
        chosen = len(order) // count
        parts = digest(x) * odd_numbers(chosen)[order % chosen]
        return torch.zeros(count, dtype=torch.int64).index_add_(0, order // chosen, parts)

    def _keep(
        self,
        call: Call,
        name: str,
        args: tuple[Any, ...],
        out: Any,
        order: Tensor | None = None,
    ) -> None:
        """Its digests; its tensors, too, if it is the suspect: the last such call stays."""
        assert self._pass is not None
        self._pass.calls.append(call)
        if self.suspect is None or self.suspect[0] != call.site:
            return
        if bool((found := call.keys == self.suspect[1]).any()):
            where, rows = [int(found.nonzero()[-1])], len(call.keys)
            if order is not None:
                where, rows = _rows_of_token(order, where[0], len(order) // rows), len(order)
            self.evidence = Evidence.of(name, args, out, where, rows)
            self.objects = [None if isinstance(a, Tensor) else a for a in args]

    def _keep_choice(self, topk: Call, indices: Tensor, scope: _Scope) -> None:
        assert self._pass is not None
        module, _, number = topk.site
        chosen = self._digest((indices,), topk.keys, scope)
        site = (module, CHOSEN_EXPERTS, number)
        self._pass.calls.append(replace(topk, site=site, outputs=chosen))


def _rows_of_token(order: Tensor, token: int, chosen: int) -> list[int]:
    """Where the rows of a token are that experts sorted, in the order in which it chose them."""
    where = (order // chosen == token).nonzero()[:, 0]
    rows: list[int] = where[order[where].argsort()].tolist()
    return rows


def _common_name(name: str, args: tuple[Any, ...]) -> str:
    """What both engines call it, though they reach it by other ways."""
    if name in ATTENTION:
        return "attention"
    is_whole = any(isinstance(a, RowParallel) and a.blocks == 1 for a in args)
    return "linear" if name == "row_parallel_linear" and is_whole else name


def _store_digest(k: Tensor, v: Tensor, layout: AttentionLayout | PagedLayout) -> Tensor:
    """int64 [T]: of the keys and values of all positions up to each query's own."""
    if isinstance(layout, PagedLayout):
        k, v, layout = k.flatten(0, 1), v.flatten(0, 1), layout.by_rows()
    lens = layout.key_lens
    rows = torch.cat([where[:n] for where, n in zip(layout.key_rows, lens, strict=True)])
    each = digest(k[rows]) * 0x2545F4914F6CDD1D + digest(v[rows])
    odd = odd_numbers(max(lens))
    sums = [(part * odd[: len(part)]).cumsum(0) for part in each.split(list(lens))]
    return torch.cat([s[len(s) - n :] for s, n in zip(sums, layout.query_lens, strict=True)])
