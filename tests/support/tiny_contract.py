"""Contracts of a tiny model with every kind of operator, for the checks at start-up."""

from __future__ import annotations

import dataclasses

from onpolicy.contract import NumericsContract, OperatorShapes

CONTRACT = NumericsContract(
    backend="cpu",
    device="cpu",
    dtype="float32",
    shapes=OperatorShapes(
        linear=((208, 96, False), (137, 96, True), (600, 512, False)),
        heads=6,
        kv_heads=2,
        head_dim=48,
        norm=(48, 96),
        layer_norm=(96,),
        vocab_size=137,
        experts=((6, 72, 96, 2),),
    ),
)
"""On one rank."""

SHARED = dataclasses.replace(
    CONTRACT,
    row_parallel_blocks=4,
    shapes=dataclasses.replace(
        CONTRACT.shapes, row_linear=((96, 208, True), (96, 1504, False)), kv_heads=6
    ),
)
"""Sums over K in the blocks of up to four ranks."""
