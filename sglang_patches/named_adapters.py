"""Several adapters of one shape beside one base, each under a name: runs of their own share an engine.

A request says by SGLang's own `lora_path` whose adapters it is to be answered with; one without a name,
or with one that no run has pushed yet, is refused. The rows of a batch are told apart by SGLang's
`lora_ids`, and each name's are computed by themselves: the operators are row-invariant, so the rows have
the bits that they have alone. The id counts the pushes of its name, and the prefix cache is apart by it,
so a push needs no flush of what other names have cached. A run that interrupts what it samples aborts
the requests of its name, and no others.

Source: TokenizerManager._validate_and_resolve_lora, sglang/srt/managers/tokenizer_manager.py. SGLang's
own LoRA has kernels of its own, whose bits depend on the batch, and loads adapters from files.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onpolicy.contract import ALL_OF, NAMES_VARIABLE, AdapterShape
from onpolicy.models.adapters import CHILD, adapter_beside
from onpolicy.models.experts import AlignedExperts
from onpolicy.models.low_rank import LowRankModule
from onpolicy.ops import Operators
from onpolicy.ops.experts import ExpertFactors
from sglang_patches import registry

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
RESOLVE_TARGET = f"{_MANAGER}._validate_and_resolve_lora"
ANSWER_TARGET = f"{_MANAGER}._wait_one_response"
ABORT_TARGET = f"{_MANAGER}.abort_request"
VERSION_TARGET = (
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin."
    "_update_weight_version_if_provided"
)
HEAD_TARGET = "sglang.srt.layers.logits_processor.LogitsProcessor._get_pruned_states"
FORWARD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


def names() -> tuple[str, ...]:
    """Those that this engine was started with; none: it has one set of weights."""
    return tuple(os.environ.get(NAMES_VARIABLE, "").split())


def install() -> None:
    """Hook SGLang, if the engine has names."""
    if not names():
        return
    pushes = Pushes(names())
    registry.hook(RESOLVE_TARGET, pushes.resolve, "replace")
    registry.hook(VERSION_TARGET, pushes.note, "after")
    registry.hook(ANSWER_TARGET, pushes.tell, "around")
    registry.hook(ABORT_TARGET, _abort, "around")
    registry.hook(FORWARD_TARGET, _rows.watch, "before")
    registry.hook(HEAD_TARGET, _head_rows.watch, "after")


class Pushes:
    """What the process that all requests come through knows of the names: their pushes so far."""

    def __init__(self, held: Sequence[str]):
        self._names = held
        self._versions: dict[str, str] = {}
        self._counts = dict.fromkeys(held, 0)

    def note(self, _: Any, __: Any, weight_version: str | None) -> None:
        """After a bucket was loaded."""
        name, _, version = (weight_version or "").rpartition(":")
        if name in self._counts:
            self._versions[name] = version
            self._counts[name] += 1

    async def resolve(self, _: Any, request: Any) -> None:
        """Give a request the ids of its adapters. Raises ValueError, which SGLang answers with 400."""
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

        if isinstance(request.rid, str) and request.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            return  # computes a token of the base, which nobody reads
        if getattr(request, "session_params", None):
            raise ValueError(
                "session_params: a session's cache is not apart by adapters. Leave it out."
            )
        given = request.lora_path
        ids = [self._id(name) for name in given] if isinstance(given, list) else self._id(given)
        request.lora_id = ids
        for i, part in request.__dict__.get("_sub_obj_cache", {}).items():
            part.lora_id = ids[i] if isinstance(ids, list) else ids

    def _id(self, name: str | None) -> str:
        if name not in self._versions:
            rule = (
                "nothing was pushed under this name yet" if name in self._names
                else f"this engine has adapters named {', '.join(self._names)}, and no others"
            )  # fmt: skip
            raise ValueError(
                f"lora_path={name!r}: {rule}, and a request is never answered by the base instead. Give "
                "the name of a run that has pushed its adapters (--lora-name)."
            )
        return f"/{name}:{self._counts[name]}"

    async def tell(
        self, original: Any, manager: Any, request: Any, *more: Any
    ) -> AsyncIterator[Any]:
        """Answers that say the version of their own adapters, where SGLang says that of the last push.

        No weights change while a request is under way; where they did all the same, the answer is left
        as it is, and a run refuses it.
        """
        async for answer in original(manager, request, *more):
            meta, version = answer["meta_info"], self._versions.get(request.lora_path)
            spans = meta.get("weight_versions") or []
            if version is not None and len(spans) <= 1:
                meta["weight_version"] = version
                for span in spans:
                    span["version"] = version
            yield answer


def _abort(original: Any, manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Give up a request; where `rid` is ALL_OF a name, whatever is asked under it.

    SGLang passes an abort on once for each request, also before the request itself, which then goes on.
    """
    if abort_all or not rid.startswith(ALL_OF):
        original(manager, rid, abort_all)
        return
    for asked, state in list(manager.rid_to_state.items()):
        if ALL_OF + str(state.obj.lora_path) == rid:
            state.abort_sent = False
            original(manager, asked)


class Rows:
    """Whose the rows of the batch are that is computed now."""

    def __init__(self) -> None:
        self.of_requests: list[str | None] = []
        self.of_rows: list[str | None] = []
        self._places: dict[str | None, Tensor] = {}

    def watch(self, _: Any, batch: Any, *__: Any, **___: Any) -> None:
        """Before a forward pass; a request that is drafted for has as many rows as any other."""
        names = [_name(given) for given in batch.lora_ids or [None] * batch.batch_size]
        mode = batch.forward_mode
        if not names or mode.is_decode() or mode.is_target_verify():
            counts = [len(batch.input_ids) // max(len(names), 1)] * len(names)
        else:
            counts = batch.extend_seq_lens.tolist()
        self.of_requests = names
        of_rows = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
        self.set(of_rows, batch.input_ids.device)

    def set(self, of_rows: Sequence[str | None], device: torch.device | str = "cpu") -> None:
        self.of_rows, self._places = list(of_rows), _places(of_rows, device)

    def places(self, count: int) -> dict[str | None, Tensor]:
        """Where the rows of each name are among `count`, of names that any has: int64, ascending."""
        if len(self.of_rows) != count:
            raise RuntimeError(
                f"{count} rows, of which {len(self.of_rows)} are known by their names"
            )
        return self._places


class HeadRows:
    """Whose the rows are that logits are computed of: in chunks, one after the other."""

    def __init__(self, rows: Rows):
        self._rows = rows
        self._left: list[str | None] = []
        self._device = torch.device("cpu")

    def watch(self, pruned: Any, *_: Any, **__: Any) -> Any:
        """After they were chosen: all rows, or the last of each request, or, of prompts, those whose
        requests are listed."""
        states, requests, names = pruned[0], pruned[-1], self._rows.of_requests
        self._device = states.device
        is_whole = len(states) == len(self._rows.of_rows)
        self._left = [names[i] for i in requests] or (self._rows.of_rows if is_whole else names)
        return pruned

    def places(self, count: int) -> dict[str | None, Tensor]:
        """As those of `Rows`, of the next `count` rows."""
        if len(self._left) < count:
            raise RuntimeError(f"{count} rows, of which {len(self._left)} are known by their names")
        chunk, self._left = self._left[:count], self._left[count:]
        return _places(chunk, self._device)


def _places(of_rows: Sequence[str | None], device: torch.device | str) -> dict[str | None, Tensor]:
    places: dict[str | None, list[int]] = {}
    for i, name in enumerate(of_rows):
        places.setdefault(name, []).append(i)
    return {name: torch.tensor(its, device=device) for name, its in places.items()}


def _name(lora_id: str | None) -> str | None:
    return lora_id.rpartition("/")[2].rpartition(":")[0] if lora_id else None


_rows = Rows()
_head_rows = HeadRows(_rows)


class NamedLowRank(nn.Module):
    """The adapters of all names beside one linear, in the place of the only one."""

    def __init__(
        self, linear: Any, operators: Operators, shape: AdapterShape, rows: Rows | HeadRows = _rows
    ):
        super().__init__()
        self._rows = rows
        for name in names():
            self.add_module(_child(name), adapter_beside(linear, operators, shape))

    def forward(self, x: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        """[..., K], what the linear gives, [..., N], and its bias [N] -> [..., N] in its dtype."""
        flat, added = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1]).clone()
        for name, rows in self._rows.places(len(flat)).items():
            if name is not None:
                added[rows] = self.get_submodule(_child(name))(flat[rows], added[rows], bias)
        return added.view(out.shape)


class NamedExperts(NamedLowRank):
    """The adapters of all names beside the experts of one layer, which compute name by name."""

    def __init__(self, experts: AlignedExperts, operators: Operators, shape: AdapterShape):
        super().__init__(experts, operators, shape)
        self._compute, self._name = experts.forward, ""
        experts.forward = self.by_names  # type: ignore[method-assign]

    @property
    def is_on(self) -> bool:
        """Whether the rows that are computed now have a name."""
        return bool(self._name)

    @property
    def factors(self) -> ExpertFactors:
        """Those of their name."""
        adapter: Any = self.get_submodule(_child(self._name))
        factors: ExpertFactors = adapter.factors
        return factors

    def by_names(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `AlignedExperts.forward`."""
        out = torch.empty_like(hidden_states)
        for name, rows in self._rows.places(len(hidden_states)).items():
            self._name = name or ""
            out[rows] = self._compute(hidden_states[rows], top_k_index[rows], top_k_weights[rows])
        return out


def _child(name: str) -> str:
    """What a name's adapter is called among the modules of its linear: no name is one of torch's."""
    return f"of_{name}"


def place_of(name: str) -> Callable[[str], str]:
    """A trainer's name of a parameter -> the engine's, of what was pushed under a name."""
    return lambda parameter: parameter.replace(f".{CHILD}.", f".{CHILD}.{_child(name)}.")


def put_in(model: Any, operators: Operators, shape: AdapterShape | None) -> None:
    """Where the engine has names, one adapter for each of them in the place of every adapter."""
    if not names() or shape is None:
        return
    for module in list(model.modules()):
        if not isinstance(module._modules.get(CHILD), LowRankModule):
            continue
        if isinstance(module, AlignedExperts):
            named: NamedLowRank = NamedExperts(module, operators, shape)
        else:
            is_head = module is getattr(model, "lm_head", None)
            named = NamedLowRank(module, operators, shape, _head_rows if is_head else _rows)
        module.add_module(CHILD, named)
