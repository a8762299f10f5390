"""Which experts routers chose: a token for which the engines chose others is no small difference."""

from __future__ import annotations

import torch
from torch import Tensor

from onpolicy.errors import EngineError
from onpolicy.explain.taps.points import Kept, KeptRows
from onpolicy.explain.taps.recorder import CHOSEN_EXPERTS
from onpolicy.models.routing_replay import OWN_CHOICE


def require_choices(rollout: KeptRows, train: KeptRows) -> None:
    """Raise EngineError if the rollout has not recorded each choice of the trainer's routers."""
    if missing := sorted(_choices(train).keys() - _choices(rollout).keys()):
        raise EngineError(
            f"the rollout recorded no choice of experts of {', '.join(missing)}, so nothing says "
            "whether both engines chose the same. Explain without --attribution operators."
        )


def other_choices(rollout: KeptRows, train: KeptRows) -> Tensor:
    """int64: the keys of tokens for which some router of the rollout chose other experts than the
    trainer's, of rows that `in_both` has matched."""
    found = [torch.empty(0, dtype=torch.int64)]
    ours = _choices(train)
    for module, theirs in _choices(rollout).items():
        found.append(theirs.keys[(theirs.rows[0] != ours[module].rows[0]).any(1)])
    keys: Tensor = torch.cat(found).unique()
    return keys


def count_before(others: Tensor, keys: Tensor) -> int:
    """How many tokens of a sequence come up to the first of `others`, it included: all that is asked
    of these is made without it."""
    found: list[int] = torch.isin(keys, others).nonzero()[:, 0].tolist()
    return found[0] + 1 if found else len(keys)


def chosen_experts(rows: KeptRows, keys: Tensor, num_layers: int) -> Tensor | None:
    """int64 [T, layers x k], as `PackedTokens` has it; None of a model without experts."""
    table: Tensor | None = None
    for module, kept in _choices(rows).items():
        if table is None:
            table = torch.full((len(keys), num_layers, kept.rows[0].shape[1]), OWN_CHOICE)
        where, known = kept.find(keys)
        layer = int(module.split(".")[1])
        table[:, layer] = torch.where(known[:, None], kept.rows[0][where], OWN_CHOICE)
    return None if table is None else table.flatten(1)


def _choices(rows: KeptRows) -> dict[str, Kept]:
    """Experts, int64 [n, k], by the names of their modules."""
    return {point[0][0]: kept for point, kept in rows.items() if point[0][1] == CHOSEN_EXPERTS}
