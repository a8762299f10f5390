"""How much of the mismatch each kind of operator, or each layer, causes: the same tokens under many
contracts.

The aligned engines sample. Every later server is given those tokens (`sglang_patches/given_tokens.py`):
it prefills in chunks, finds prefixes in its cache and decodes in batches as it does, and the trainer
scores the same tokens, packed, under the same contract. So the rows of the table differ in what the
engines run on, and in nothing else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from onpolicy.config.explain import ExplainConfig
from onpolicy.contract import KINDS, OUTSIDE, NumericsContract
from onpolicy.errors import EngineError
from onpolicy.explain.effects import ALIGNED, MODEL, STOCK, all_but, model_and, row_with, shares
from onpolicy.explain.inputs import Inputs, Result, told
from onpolicy.explain.shapley import Order, draw_orders, sets_of, standard_error
from onpolicy.parity import compare_log_probs, k3
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.cluster_engines import MakeEngines
from onpolicy.run.launch.contracts import require_attention
from onpolicy.types import Request

logger = logging.getLogger(__name__)

GIVEN_TOKENS = "sglang_patches.given_tokens:GivenTokens"
"""The extension of a server that answers with the tokens of a file."""


def attribute(config: ExplainConfig, make_engines: MakeEngines = EnginePair) -> Result:
    """One row for each contract: all aligned, all stock, each kind or layer alone, and all but each; and
    those that --orders go through."""
    assert config.attribution is not None and config.attribution != "operators"
    inputs = Inputs.of(config)
    aligned, stock = inputs.contract(aligned=True), inputs.contract(aligned=False)
    require_attention(aligned.shapes, ("model",))
    parts = parts_of(aligned, config.attribution, inputs.hf_config.num_hidden_layers)
    contracts, names = list(contracts_of(aligned, stock, parts)), [name for name, *_ in parts]
    orders = draw_orders(names, config.orders, config.seed)
    between = list(contracts_between(parts, orders))
    logger.info("servers to start: %d, and %d for orders", len(contracts), len(between))
    tokens = inputs.directory / "tokens.json"
    tokens.unlink(missing_ok=True)
    with inputs.engines(aligned, GIVEN_TOKENS, tokens, make_engines) as engines:
        rows = list(
            measure(engines, inputs.requests, config.temperature, tokens, [*contracts, *between])
        )
    result: Result = {"by": config.attribution, "rows": rows[: len(contracts)], **told(aligned)}
    if orders:
        shared = [asdict(one) for one in shares(rows, names, orders)]
        result["orders"] = {"drawn": orders, "rows": rows[len(contracts) :], "shares": shared}
    return result


Part = tuple[str, NumericsContract, NumericsContract]
"""A kind or a layer: its name, a contract that aligns it alone, one that aligns all but it."""


def parts_of(aligned: NumericsContract, by: Literal["kinds", "layers"], layers: int) -> list[Part]:
    """The kinds of operators that the model has, `model` apart; or its layers and what is OUTSIDE."""
    parts, always = [*map(str, range(layers)), OUTSIDE], tuple[str, ...]()
    if by == "kinds":
        parts, always = list(KINDS), ("model",)
        if not aligned.shapes.experts:
            parts.remove("experts")

    def aligning(*only: str) -> NumericsContract:
        return replace(aligned, kinds=only) if by == "kinds" else replace(aligned, layers=only)

    return [
        (
            f"layer {part}" if part.isdecimal() else part,
            aligning(*always, part),
            aligning(*(other for other in parts if other != part)),
        )
        for part in parts
        if part not in always
    ]


def contracts_of(
    aligned: NumericsContract, stock: NumericsContract, parts: Sequence[Part]
) -> Iterator[tuple[str, NumericsContract]]:
    """The rows' names and contracts; the aligned one is first."""
    yield ALIGNED, aligned
    yield STOCK, stock
    yield MODEL, replace(aligned, kinds=("model",))
    yield from ((model_and(name), alone) for name, alone, _ in parts)
    yield from ((all_but(name), others) for name, _, others in parts)


def contracts_between(
    parts: Sequence[Part], orders: Sequence[Order]
) -> Iterator[tuple[str, NumericsContract]]:
    """What orders go through beside those: more than one part is aligned, and more than one is stock."""
    names = [name for name, *_ in parts]
    for group in sets_of(orders):
        if 1 < len(group) < len(parts) - 1:
            yield row_with(group, names), together([own for name, own, _ in parts if name in group])


def together(contracts: Sequence[NumericsContract]) -> NumericsContract:
    """All kinds, or layers, that these partial contracts align."""
    kinds = dict.fromkeys(kind for contract in contracts for kind in contract.kinds)
    layers = dict.fromkeys(layer for contract in contracts for layer in contract.layers)
    return replace(contracts[0], kinds=tuple(kinds), layers=tuple(layers))


def measure(
    engines: EnginePair,
    requests: Sequence[Request],
    temperature: float,
    tokens: Path,
    contracts: Sequence[tuple[str, NumericsContract]],
) -> Iterator[Result]:
    """What engines make of the same tokens and weights under each contract; the first samples them.

    tokens: the file that servers are given them in. Raises EngineError if one answers with others.
    """
    given: list[list[int]] | None = None
    for number, (name, contract) in enumerate(contracts):
        logger.info("%d of %d: %s", number + 1, len(contracts), name)
        engines.use(contract, engines.config.fallback)
        engines.push_weights(number)
        rollout = engines.generate(requests)
        responses = [completion.response_ids for completion in rollout]
        if given is None:
            given, prompts = responses, [request.prompt_ids for request in requests]
            tokens.write_text(json.dumps(list(zip(prompts, given, strict=True))))
        if responses != given:
            raise EngineError(
                "a server did not answer with the tokens that it was given, so its log-probabilities "
                "are of others. Two prompts may be the same: give a larger --max-prompt-len."
            )
        train = engines.score(requests, rollout, temperature)
        row = difference(train, [torch.tensor(c.rollout_log_probs) for c in rollout])
        logger.info("%s: k3 %.2g", name, row["k3_kl_mean"])
        aligned = {"kinds": list(contract.kinds), "layers": list(contract.layers)}
        yield {"name": name, **aligned, **row}


def difference(train: Sequence[Tensor], rollout: Sequence[Tensor]) -> dict[str, Any]:
    """How two engines' log-probabilities of the same tokens differ: float32 [R] of each response."""
    ours, theirs = torch.cat(list(train)), torch.cat(list(rollout))
    counts, _ = compare_log_probs(ours, theirs)
    of_tokens = [k3(*pair).double() for pair in zip(train, rollout, strict=True)]
    sums = torch.stack([own.sum() for own in of_tokens])
    lengths = [len(own) for own in of_tokens]
    return {
        "num_compared_tokens": counts.num_compared,
        "num_mismatched_tokens": counts.num_mismatched,
        "k3_kl_mean": counts.mean_k3,
        "k3_kl_standard_error": standard_error(sums, torch.tensor(lengths).double()),
        "mean_abs_diff": counts.mean_abs_diff,
        "max_abs_diff": counts.max_abs_diff,
        "sequence_lengths": lengths,
        "sequence_k3_kl_sums": sums.tolist(),
    }
