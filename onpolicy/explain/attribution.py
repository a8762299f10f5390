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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from onpolicy.config.explain import ExplainConfig
from onpolicy.contract import KINDS, OUTSIDE, NumericsContract
from onpolicy.errors import EngineError
from onpolicy.explain.inputs import Inputs, Result, told
from onpolicy.parity import compare_log_probs, k3
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.cluster_engines import MakeEngines
from onpolicy.run.launch.contracts import require_attention
from onpolicy.types import Request

logger = logging.getLogger(__name__)

GIVEN_TOKENS = "sglang_patches.given_tokens:GivenTokens"
"""The extension of a server that answers with the tokens of a file."""

Row = Mapping[str, Any]

STOCK, MODEL, ALIGNED = "stock", "model", "aligned"
"""Rows: nothing is shared; the engine runs the trainer's modelling code, all stock; everything."""


def attribute(config: ExplainConfig, make_engines: MakeEngines = EnginePair) -> Result:
    """One row for each contract: all aligned, all stock, each kind or layer alone, and all but each."""
    assert config.attribution is not None and config.attribution != "operators"
    inputs = Inputs.of(config)
    aligned, stock = inputs.contract(aligned=True), inputs.contract(aligned=False)
    require_attention(aligned.shapes, ("model",))
    parts = parts_of(aligned, config.attribution, inputs.hf_config.num_hidden_layers)
    contracts = list(contracts_of(aligned, stock, parts))
    tokens = inputs.directory / "tokens.json"
    tokens.unlink(missing_ok=True)
    with inputs.engines(aligned, GIVEN_TOKENS, tokens, make_engines) as engines:
        rows = list(measure(engines, inputs.requests, config.temperature, tokens, contracts))
    return {"by": config.attribution, "rows": rows, **told(aligned)}


def model_and(part: str) -> str:
    """The row in which one kind of operator, or one layer, is aligned."""
    return f"{MODEL} + {part}"


def all_but(part: str) -> str:
    """The row in which one kind of operator, or one layer, is stock."""
    return f"{ALIGNED} - {part}"


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
    return {
        "num_compared_tokens": counts.num_compared,
        "num_mismatched_tokens": counts.num_mismatched,
        "k3_kl_mean": counts.mean_k3,
        "k3_kl_standard_error": _standard_error(
            [k3(*pair) for pair in zip(train, rollout, strict=True)]
        ),
        "mean_abs_diff": counts.mean_abs_diff,
        "max_abs_diff": counts.max_abs_diff,
    }


def _standard_error(of_tokens: Sequence[Tensor]) -> float:
    """The standard error of the mean over all tokens: those of one sequence are not independent.

    of_tokens: [R] of each sequence. Source: the ratio estimator, Cochran, Sampling Techniques (1977).
    """
    sums = torch.stack([own.double().sum() for own in of_tokens])
    tokens = torch.tensor([len(own) for own in of_tokens]).double()
    apart = sums - tokens * sums.sum() / tokens.sum()
    count = len(of_tokens)
    return float((count / max(count - 1, 1) * apart.square().sum()).sqrt() / tokens.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What aligning one part, a kind of operator or a layer, does to the mean k3."""

    part: str
    before: float
    after: float

    stands_out: bool
    """Whether the change is more than twice the standard error of either number."""

    left: float | None
    """The k3 with every other part aligned, and this one stock; None of `model`, without which nothing
    is aligned."""

    @property
    def percent(self) -> float:
        """Change of the k3; 0 if there was none before."""
        return 100 * (self.after / self.before - 1) if self.before else 0.0


def effects(rows: Sequence[Row]) -> list[Effect]:
    """The effect of `model` on stock engines, then of each part alone on top of it."""
    by_name = {row["name"]: row for row in rows}
    model = by_name[MODEL]
    parts = [name.removeprefix(model_and("")) for name in by_name if name.startswith(model_and(""))]
    of_parts = (_effect(p, model, by_name[model_and(p)], by_name[all_but(p)]) for p in parts)
    return [_effect("model", by_name[STOCK], model, None), *of_parts]


def _effect(part: str, one: Row, other: Row, others: Row | None) -> Effect:
    before, after = one["k3_kl_mean"], other["k3_kl_mean"]
    error = max(one["k3_kl_standard_error"], other["k3_kl_standard_error"])
    left = None if others is None else others["k3_kl_mean"]
    is_clear = abs(before - after) > 2 * error
    return Effect(part=part, before=before, after=after, stands_out=is_clear, left=left)


def sums(rows: Sequence[Row]) -> tuple[float, float] | None:
    """How far effects add up: (what parts take away one by one, what they leave when one by one they
    are stock), each added up and as a share of the k3 that all of them together take away.

    None if there is nothing to take away. `model` is no part of it: it comes with each of them.
    """
    whole = {row["name"]: row["k3_kl_mean"] for row in rows}[MODEL]
    parts = [effect for effect in effects(rows) if effect.left is not None]
    if not whole:
        return None
    taken = sum(effect.before - effect.after for effect in parts)
    return taken / whole, sum(effect.left or 0.0 for effect in parts) / whole


def attribution_text(rows: Sequence[Row], by: str) -> str:
    """The table and what it says, for a terminal; `by`: kinds or layers."""
    return "\n".join(_lines(rows, by))


def _lines(rows: Sequence[Row], by: str) -> Iterator[str]:
    yield f"{rows[0]['num_compared_tokens']} tokens, the same in every row"
    yield f"{'':22}{'k3':>9} {'+-':>8} {'mean |d|':>9} {'max |d|':>9} {'mismatched':>11}"
    for row in rows:
        yield (
            f"{row['name']:22}{row['k3_kl_mean']:9.2g} {row['k3_kl_standard_error']:8.1g} "
            f"{row['mean_abs_diff']:9.2g} {row['max_abs_diff']:9.2g} {row['num_mismatched_tokens']:11}"
        )
    model, *parts = effects(rows)
    yield f"Running the trainer's modelling code in the engine {_change(model)}."
    yield f"There, of one of the {by} alone:"
    for effect in parts:
        yield (
            f"  {effect.part}: aligned, it {_change(effect)}; stock, with all else aligned, it makes "
            f"{effect.left:.2g}"
        )
    if (shares := sums(rows)) is not None:
        taken, left = (f"{100 * share:.0f} %" for share in shares)
        yield (
            f"Added up, the {by} take away {taken} of that k3 one by one, and leave {left} of it; what "
            "is missing to 100 % is what they do to each other."
        )


def _change(effect: Effect) -> str:
    if effect.after == effect.before:
        return "changes nothing"
    told = f"takes k3 from {effect.before:.2g} to {effect.after:.2g} ({effect.percent:+.0f} %)"
    return told if effect.stands_out else f"{told}, no more than chance"
