"""Recorder of operator calls, by a digest per row of inputs and results, and one side's recording.

A recording holds, for every operator of every module, its rows by their keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onpolicy.explain.taps.evidence import ALL_HERE, ATTENTION, Evidence, Scope, Together
from onpolicy.explain.taps.row_keys import Part, Store, Tensors, Widths, rows_of_token
from onpolicy.ops.row_parallel import RowParallel

HEAD = "lm_head"
"""The module name for calls outside decoder modules: the output projection, and its successors."""

HEAD_ADAPTER = f"{HEAD}.lora"
"""The module name for calls of the output projection's adapter."""

CHOSEN_EXPERTS = "chosen experts"
"""A site beside each `topk`, for its indices alone: whether a router chose other experts."""

_FIRST = slice(0, 1)
INPUTS = {
    **dict.fromkeys(("linear", "row_parallel_linear"), _FIRST),
    **dict.fromkeys(("grouped_linear", "grouped_partial_linear"), _FIRST),
    **dict.fromkeys(("attention", "paged_attention"), _FIRST),
    **dict.fromkeys(("rms_norm", "layer_norm", "softmax", "topk"), _FIRST),
    "elementwise": slice(1, 2),
    "gated": slice(1, 3),
    "add_scaled": slice(0, 2),
    "rotary": slice(0, 2),
}
"""The recorded operators, and the slice of their arguments with rows; not weights and settings."""

Site = tuple[str, str, int]
"""(module, operator, index of its call in a pass). Example: ("layers.0.mlp", "gated", 0)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of an operator; all tensors int64 [n], n: its rows with a key."""

    site: Site

    rank: int
    """The rollout's tensor-parallel rank that computed it, or that has this part of it."""

    keys: Tensor
    inputs: Tensor
    outputs: Tensor

    store: Tensor | None
    """A digest of the keys and values that each row's token sees, for attention."""

    widths: Widths
    shape: tuple[int, ...]
    """The shape of the first argument."""


@dataclass(slots=True)
class _Pass:
    keys: Tensor
    head_rows: Tensor
    calls: list[Call] = field(default_factory=list)
    head_done: Counter[tuple[str, str]] = field(default_factory=Counter)

    beside_head: Scope | None = None
    """The scope of the head's adapter, while it computes."""


@dataclass(slots=True)
class _Begun:
    """A call in progress."""

    name: str
    args: tuple[Any, ...]
    scope: Scope
    keys: Tensor

    given: Widths
    """The widths of inputs, keys and values."""

    sites: list[tuple[Site, Part, Tensor, Tensor | None]]
    """Each site, its part, and the digests of its inputs and of its keys and values."""


@dataclass(slots=True)
class Recorder:
    """A recorder, active while a pass is open; a call outside of one costs a comparison.

    A recorder that has recorded nothing can be sent to another process.
    """

    rank: int = 0
    """The tensor-parallel rank of the rollout that this process is."""

    shares: Mapping[Site, Mapping[int, Widths]] = field(default_factory=dict)
    """Each rollout rank's part of a site, for a trainer, if there are several ranks."""

    ranks: int = 1
    """Ranks of the rollout."""

    suspect: tuple[Site, int, int] | None = None
    """The call whose tensors are wanted: the site's last one with a row of that key, and the rank.
    """

    evidence: Evidence | None = field(default=None, init=False)
    """The tensors of that call."""

    at_head: Together = field(default=ALL_HERE, init=False)
    """The gatherer of a trainer's output projection over ranks."""

    _pass: _Pass | None = field(default=None, init=False)
    _scopes: list[Scope] = field(default_factory=list, init=False)

    def open(self, keys: Tensor, head_rows: Tensor) -> None:
        """Begin a forward pass: int64 [T], the keys of its rows, and the rows that go on to the
        head."""
        self._pass, self._scopes = _Pass(keys.cpu(), head_rows.cpu()), []

    def close(self) -> list[Call]:
        """End a forward pass and return its calls."""
        calls = self._pass.calls if self._pass else []
        self._pass = None
        return calls

    def scoped(
        self, module: nn.Module, scope_of: Callable[[Any, Any], Scope]
    ) -> list[RemovableHandle]:
        """Hook a module with a scope of its own, made from (args, kwargs)."""

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._pass is not None:
                self._scopes.append(scope_of(args, kwargs))

        def leave(*_: Any) -> None:
            if self._pass is not None and self._scopes:
                self._scopes.pop()

        begin = module.register_forward_pre_hook(enter, with_kwargs=True)
        return [begin, module.register_forward_hook(leave, always_call=True)]

    def run(self, name: str, right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of `right`, recorded as the operator `name`."""
        if self._pass is None:
            return right(*args, **kwargs)
        scope = self._running(name)
        whole = scope.together.given(name, args)
        given = whole[INPUTS[name]]
        keys = self._rows(name, given[0], scope)
        begun = self._begin(name, whole, given, scope, keys)  # now: it may write over its input
        # A router's block replaces PyTorch's functions, also those that an operator calls inside it.
        outer, self._pass = self._pass, None
        try:
            out = right(*args, **kwargs)
        finally:
            self._pass = outer
        self._end(begun, scope.together.made(name, out))
        scope.counts[common_name(name, args)] += 1
        return out

    def add(
        self, module: str, operator: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Record the results of an engine's own module, without an operator of ours."""
        if self._pass is None:
            return
        scope = Scope(module=module)
        keys = self._rows(operator, (*inputs, *outputs)[0], scope)
        self._end(self._begin(operator, tuple(inputs), inputs, scope, keys), tuple(outputs))

    def add_embedding(self, module: nn.Module, args: Any, out: Tensor) -> None:
        """Record the output of the input embedding, as its forward hook."""
        self.add("embed_tokens", "embedding", (), (out,))

    @property
    def is_open(self) -> bool:
        return self._pass is not None

    @property
    def module(self) -> str:
        """The module that is running."""
        return self._scopes[-1].module if self._scopes else HEAD

    def _running(self, name: str) -> Scope:
        """Return the scope of an operator's call. No engine calls the head as a module, so its
        adapter is detected by its first product, a row-parallel linear, and by its last operator.
        """
        if self._scopes:
            return self._scopes[-1]
        assert self._pass is not None
        if name == "row_parallel_linear":
            self._pass.beside_head = Scope(module=HEAD_ADAPTER, together=self.at_head)
        scope = self._pass.beside_head or Scope(module=HEAD, together=self.at_head)
        if name == "add_scaled":
            self._pass.beside_head = None
        return scope

    def _rows(self, name: str, x: Tensor, scope: Scope) -> Tensor:
        """Return the keys of a call's rows."""
        assert self._pass is not None
        if scope.module not in (HEAD, HEAD_ADAPTER):
            return scope.keys(name, self._pass.keys)
        call, count = (scope.module, name), x.shape[:-1].numel()
        done = self._pass.head_done[call]
        self._pass.head_done[call] += count
        return self._pass.keys[self._pass.head_rows[done : done + count]]

    def _begin(
        self, name: str, args: tuple[Any, ...], given: Sequence[Tensor], scope: Scope, keys: Tensor
    ) -> _Begun:
        inputs = Tensors(given, len(keys), scope.expert_order)
        store = Store(*args[1:4]) if name in ATTENTION and len(args) > 3 else None
        operator, begun = common_name(name, args), list[tuple[Site, Part, Tensor, Any]]()
        pieces = 2 if scope.has_halves and not scope.counts else 1
        for module, fused in (scope.fused or {scope.module: None}).items():
            site = module, operator, scope.number(operator)
            for rank, widths in self.shares.get(site, {self.rank: None}).items():
                part = Part(rank=rank, ranks=self.ranks, widths=widths, fused=fused, pieces=pieces)
                with suppress(LookupError):  # a site missing in a recording is reported
                    seen = store.digest(part.of_store) if store and part.has_store else None
                    begun.append((site, part, inputs.digest(part.of_input), seen))
        widths = inputs.widths, store.widths if store else ()
        return _Begun(name, args, scope, keys, widths, begun)

    def _end(self, begun: _Begun, out: Any) -> None:
        assert self._pass is not None
        results = out if isinstance(out, tuple) else (out,)
        made = Tensors(results, len(begun.keys), begun.scope.expert_order)
        first = next(x for x in (*begun.args, *results) if isinstance(x, Tensor))
        for site, part, inputs, store in begun.sites:
            try:
                outputs = made.digest(part.of_result)
            except LookupError:
                continue
            call = Call(
                site=site,
                rank=part.rank,
                keys=begun.keys,
                inputs=inputs,
                outputs=outputs,
                store=store,
                widths=(*begun.given, made.widths),
                shape=tuple(first.shape),
            )
            self._pass.calls.append(call)
            if begun.name == "topk":
                self._pass.calls.append(_choice(call, results[1]))
            self._keep(call, begun, out, [part.of_result(*pair) for pair in enumerate(made.widths)])

    def _keep(self, call: Call, begun: _Begun, out: Any, columns: list[Tensor | None]) -> None:
        """Keep the tensors of the call, if it is the suspect: the last such call stays."""
        if self.suspect is None or (call.site, call.rank) != (self.suspect[0], self.suspect[2]):
            return
        # Ranks that share the call take part, whether they have the row or not.
        args = begun.scope.together.held(begun.name, begun.args)
        if bool((found := call.keys == self.suspect[1]).any()):
            where, rows = [int(found.nonzero()[-1])], len(call.keys)
            if (order := begun.scope.expert_order) is not None:
                where, rows = rows_of_token(order, where[0], len(order) // rows), len(order)
            self.evidence = Evidence.of(begun.name, args, out, where, rows, columns)


def _choice(topk: Call, indices: Tensor) -> Call:
    module, _, number = topk.site
    chosen = Tensors((indices,), len(topk.keys)).digest()
    return replace(topk, site=(module, CHOSEN_EXPERTS, number), outputs=chosen)


def common_name(name: str, args: tuple[Any, ...]) -> str:
    """Return the name of an operator common to both engines, though they reach it in other ways."""
    if name in ATTENTION:
        return "attention"
    is_whole = any(isinstance(a, RowParallel) and a.blocks == 1 for a in args)
    return "linear" if name == "row_parallel_linear" and is_whole else name


Numbers = NDArray[np.int64]

SUSPECT = "suspect"
"""The file beside a rollout engine's passes that names the call whose tensors are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one site, each key once: digests int64 [n], in the ascending order of `keys`."""

    keys: Numbers
    inputs: Numbers
    outputs: Numbers
    store: Numbers | None

    call: Numbers
    """The index in `shapes` of the shape in which each row was computed."""

    shapes: list[tuple[int, ...]]
    """Shapes of the first argument of each call."""

    widths: Widths
    """The widths of the last call."""

    def find(self, keys: Numbers) -> Numbers:
        """Return the index of each of `keys`, -1 if it is missing."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        where = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where(self.keys[where] == keys, where, -1)

    def shape(self, where: int) -> tuple[int, ...]:
        """Return the shape of the call that computed a row; an empty one for a missing row."""
        return self.shapes[int(self.call[where])] if where >= 0 else ()

    @staticmethod
    def of(calls: Sequence[Call]) -> Rows:
        """Return the rows of all calls; for a key that was computed more than once, the last."""
        number = np.repeat(np.arange(len(calls)), [len(call.keys) for call in calls])
        keys = torch.cat([call.keys for call in calls]).numpy()[::-1]
        keys, first = np.unique(keys, return_index=True)

        def column(parts: Iterable[Any]) -> Numbers:
            column: Numbers = torch.cat(list(parts)).numpy()[::-1][first]
            return column

        stores = [call.store for call in calls if call.store is not None]
        return Rows(
            keys=keys,
            inputs=column(call.inputs for call in calls),
            outputs=column(call.outputs for call in calls),
            store=column(stores) if stores else None,
            call=number[::-1][first],
            shapes=[call.shape for call in calls],
            widths=calls[-1].widths,
        )


class Recording(dict[Site, dict[int, Rows]]):
    """A mapping from sites, in the order of the first forward pass, to the rows of each rank."""

    @staticmethod
    def of(passes: Iterable[Sequence[Call]]) -> Recording:
        found: dict[Site, dict[int, list[Call]]] = {}
        for calls in passes:
            for call in calls:
                found.setdefault(call.site, {}).setdefault(call.rank, []).append(call)
        return Recording(
            {
                site: {rank: Rows.of(calls) for rank, calls in by_rank.items()}
                for site, by_rank in found.items()
            }
        )

    @property
    def ranks(self) -> int:
        """The number of tensor-parallel ranks of the recorded engine."""
        return 1 + max((rank for by_rank in self.values() for rank in by_rank), default=0)

    def shares(self) -> dict[Site, dict[int, Widths]]:
        """Return each rank's part of every site; empty where one rank has everything."""
        if self.ranks == 1:
            return {}
        return {
            site: {rank: rows.widths for rank, rows in by_rank.items()}
            for site, by_rank in self.items()
        }


def write_calls(calls: Sequence[Call], file: Path) -> None:
    """Write the calls of a pass, whole or not at all."""
    partial = file.with_suffix(".partial")
    torch.save([asdict(call) for call in calls], partial)
    partial.replace(file)


def read_calls(directory: Path) -> list[list[Call]]:
    """Return the passes in a directory, in order."""
    return [
        [Call(**record) for record in torch.load(file)] for file in sorted(directory.glob("*.pass"))
    ]
