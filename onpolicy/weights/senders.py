"""The assignment of engines to the trainer's ranks, which send them weights."""

from __future__ import annotations

from collections.abc import Sequence


def share_out(near: Sequence[Sequence[bool]], *, one_copy: bool) -> list[int]:
    """Return the rank that sends to each engine: one on its host, or any if its host has none.

    near: for each rank, whether each engine is on its host. The engines of a host are spread over
    its ranks in order, so that with equally many ranks each gets the engine that shares its GPU.
    `one_copy`: the engines read the same bytes, which one rank provides for all of them.
    """
    everyone = tuple(range(len(near)))
    together: dict[tuple[int, ...], list[int]] = {}
    for engine in range(len(near[0])):
        on_its_host = tuple(rank for rank in everyone if near[rank][engine])
        together.setdefault(on_its_host or everyone, []).append(engine)
    sender = [0] * len(near[0])
    for ranks, engines in together.items():
        for place, engine in enumerate(engines):
            sender[engine] = ranks[0] if one_copy else ranks[place * len(ranks) // len(engines)]
    return sender
