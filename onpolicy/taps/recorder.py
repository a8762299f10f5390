"""Keeps, of every call of an operator, a digest per row of what went in and of what came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from onpolicy.ops.row_parallel import RowParallel
from onpolicy.taps.digests import Store, Tensors
from onpolicy.taps.evidence import ATTENTION, Evidence
from onpolicy.taps.parts import Part, Widths
from onpolicy.taps.scope import ALL_HERE, Scope, Together

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

    rank: int
    """The rollout's tensor-parallel rank that computed it, or that has this part of it."""

    keys: Tensor
    inputs: Tensor
    outputs: Tensor

    store: Tensor | None
    """A digest of the keys and values that each row's token sees, of attention."""

    widths: Widths
    shape: tuple[int, ...]
    """The shape of the first argument."""


@dataclass(slots=True)
class _Pass:
    keys: Tensor
    head_rows: Tensor
    calls: list[Call] = field(default_factory=list)
    head_done: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Begun:
    """A site of a call that is being made: its part, and the digests of what that was given."""

    site: Site
    part: Part
    inputs: Tensor
    store: Tensor | None


@dataclass(slots=True)
class _Ended:
    """A call that has been made."""

    name: str
    args: tuple[Any, ...]
    out: Any
    keys: Tensor

    given: Widths
    """The widths of inputs, keys and values."""

    scope: Scope

    @property
    def results(self) -> tuple[Tensor, ...]:
        return self.out if isinstance(self.out, tuple) else (self.out,)

    @property
    def shape(self) -> tuple[int, ...]:
        tensors = (x for x in (*self.args, *self.results) if isinstance(x, Tensor))
        return tuple(next(tensors).shape)


class Recorder:
    """Records while a pass is open; a call outside of one costs a comparison."""

    def __init__(self, rank: int = 0) -> None:
        """rank: the tensor-parallel rank of the rollout that this process is."""
        self.rank = rank

        self.shares: Mapping[Site, Mapping[int, Widths]] = {}
        """What each rank of the rollout has of a site, for a trainer, if there are several."""

        self.ranks = 1
        """Ranks of the rollout."""

        self.suspect: tuple[Site, int, int] | None = None
        """The call whose tensors are wanted: that site's last one with a row of that key, and the
        rank."""

        self.evidence: Evidence | None = None
        """Them."""

        self.objects: list[Any] = []
        """The call's arguments that are no tensors, each in its place: functions, ranks, layouts."""

        self.at_head: Together = ALL_HERE
        """How the ranks of a trainer share the output projection."""

        self._pass: _Pass | None = None
        self._scopes: list[Scope] = []

    def open(self, keys: Tensor, head_rows: Tensor) -> None:
        """A forward pass begins: int64 [T], the keys of its rows, and those that go on to the head."""
        self._pass, self._scopes = _Pass(keys.cpu(), head_rows.cpu()), []

    def close(self) -> list[Call]:
        """It has ended."""
        calls = self._pass.calls if self._pass else []
        self._pass = None
        return calls

    def enter(self, scope: Scope) -> None:
        """A module begins."""
        if self._pass is not None:
            self._scopes.append(scope)

    def leave(self) -> None:
        if self._pass is not None and self._scopes:
            self._scopes.pop()

    def run(
        self, name: str, right: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What `right` returns, recorded as the operator `name`."""
        if self._pass is None:
            return right(*args, **kwargs)
        scope = self._scopes[-1] if self._scopes else Scope(module=HEAD, together=self.at_head)
        whole = scope.together.given(name, args)
        given = whole[INPUTS[name]]
        keys = self._rows(name, given[0], scope)
        inputs = Tensors(given, len(keys), scope.expert_order)
        store = Store(*whole[1:4]) if name in ATTENTION else None
        operator = _common_name(name, args)
        sites = self._begin(scope, operator, inputs, store)  # now: it may write over its input
        out = right(*args, **kwargs)
        widths = inputs.widths, store.widths if store else ()
        made = scope.together.made(name, out)
        self._end(sites, _Ended(name, whole, made, keys, widths, scope))
        scope.counts[operator] += 1
        return out

    def add(
        self, module: str, operator: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Record what a module of an engine's own computed, without an operator of ours."""
        scope = Scope(module=module)
        keys = self._rows(operator, outputs[0], scope)
        given = Tensors(inputs, len(keys))
        sites = self._begin(scope, operator, given, None)
        widths = given.widths, ()
        self._end(sites, _Ended(operator, tuple(inputs), tuple(outputs), keys, widths, scope))

    @property
    def is_open(self) -> bool:
        return self._pass is not None

    @property
    def module(self) -> str:
        """The one that is running."""
        return self._scopes[-1].module if self._scopes else HEAD

    def _rows(self, name: str, x: Tensor, scope: Scope) -> Tensor:
        """The keys of a call's rows."""
        assert self._pass is not None
        if scope.module != HEAD:
            return scope.keys(name, self._pass.keys)
        done, count = self._pass.head_done[name], x.shape[:-1].numel()
        self._pass.head_done[name] += count
        return self._pass.keys[self._pass.head_rows[done : done + count]]

    def _begin(
        self, scope: Scope, operator: str, inputs: Tensors, store: Store | None
    ) -> list[_Begun]:
        found: list[_Begun] = []
        pieces = 2 if scope.has_halves and not scope.counts else 1
        for module, fused in (scope.fused or {scope.module: None}).items():
            site = module, operator, scope.number(operator)
            for rank, widths in self.shares.get(site, {self.rank: None}).items():
                part = Part(rank=rank, ranks=self.ranks, widths=widths, fused=fused, pieces=pieces)
                try:
                    given = inputs.digest(part.of_input)
                    seen = store.digest(part.of_store) if store and part.has_store else None
                except LookupError:  # so it is missing in one of the recordings, which is said
                    continue
                found.append(_Begun(site, part, given, seen))
        return found

    def _end(self, sites: Sequence[_Begun], ended: _Ended) -> None:
        assert self._pass is not None
        made = Tensors(ended.results, len(ended.keys), ended.scope.expert_order)
        for begun in sites:
            columns = begun.part.of_result
            try:
                outputs = made.digest(columns)
            except LookupError:
                continue
            call = Call(
                site=begun.site,
                rank=begun.part.rank,
                keys=ended.keys,
                inputs=begun.inputs,
                outputs=outputs,
                store=begun.store,
                widths=(*ended.given, made.widths),
                shape=ended.shape,
            )
            self._pass.calls.append(call)
            if ended.name == "topk":
                self._pass.calls.append(_choice(call, ended.results[1]))
            self._keep(call, ended, [columns(*pair) for pair in enumerate(made.widths)])

    def _keep(self, call: Call, ended: _Ended, columns: list[Tensor | None]) -> None:
        """Its tensors, if it is the suspect: the last such call stays."""
        if self.suspect is None or (call.site, call.rank) != (self.suspect[0], self.suspect[2]):
            return
        # Ranks that share the call take part, whether they have the row or not.
        args = ended.scope.together.held(ended.name, ended.args)
        if bool((found := call.keys == self.suspect[1]).any()):
            where, rows = [int(found.nonzero()[-1])], len(call.keys)
            if (order := ended.scope.expert_order) is not None:
                where, rows = _rows_of_token(order, where[0], len(order) // rows), len(order)
            self.evidence = Evidence.of(ended.name, args, ended.out, where, rows, columns)
            self.objects = [None if isinstance(a, Tensor) else a for a in args]


def _choice(topk: Call, indices: Tensor) -> Call:
    module, _, number = topk.site
    chosen = Tensors((indices,), len(topk.keys)).digest(lambda *_: None)
    return replace(topk, site=(module, CHOSEN_EXPERTS, number), outputs=chosen)


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
