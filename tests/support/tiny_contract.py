"""Contracts of a tiny model with every kind of operator, for the checks at start-up."""

import dataclasses

from onpolicy.contract import AttentionShape, DeltaShape, NumericsContract, OperatorShapes

ATTENTION = AttentionShape(heads=6, kv_heads=2, head_dim=48, value_dim=48)
LATENT = AttentionShape(heads=4, kv_heads=4, head_dim=40, value_dim=24)
WINDOWS = (
    dataclasses.replace(ATTENTION, window=33, softcap=3.0),
    dataclasses.replace(ATTENTION, window=128, sinks=True),
)
DELTA = DeltaShape(key_heads=2, value_heads=6, key_dim=24, value_dim=16, kernel_size=4)

CONTRACT = NumericsContract(
    backend="cpu",
    device="cpu",
    dtype="float32",
    shapes=OperatorShapes(
        linear=((208, 96, False), (137, 96, True), (600, 512, False)),
        attention=(ATTENTION, LATENT, *WINDOWS),
        norm=(48, 96),
        layer_norm=(96,),
        vocab_size=137,
        experts=((6, 72, 96, 2),),
        delta=(DELTA,),
    ),
)
"""On one rank."""

SHARED = dataclasses.replace(
    CONTRACT,
    row_parallel_blocks=4,
    shapes=dataclasses.replace(
        CONTRACT.shapes,
        row_linear=((96, 208, True), (96, 1504, False)),
        attention=(dataclasses.replace(ATTENTION, kv_heads=6),),
    ),
)
"""Sums over K in the blocks of up to four ranks."""
