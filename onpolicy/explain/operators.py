"""`onpolicy explain --attribution operators`: what each contributes to a real mismatch, in nats.

The engines run as they are, once to see how much they compute and once to keep all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from onpolicy.config.explain import SEVERAL_PROMPTS, ExplainConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.explain.choices import count_before, other_choices, require_choices
from onpolicy.explain.contributions import Contribution, Contributions, contributions
from onpolicy.explain.exact import ExactModel, exact_policy
from onpolicy.explain.inputs import Inputs, Result, told
from onpolicy.explain.microscope import LOG_SOFTMAX, Microscope, look_through
from onpolicy.explain.ranks import joined, rows_by_rank
from onpolicy.explain.shares import table
from onpolicy.explain.taps.points import Forced, KeptRows, Point, gathered, in_both, kept_rows
from onpolicy.explain.taps.recorder import Recorder
from onpolicy.explain.taps.recording import ALL_ROWS, Recording, Rows, read_calls
from onpolicy.explain.taps.rows import prefix_keys
from onpolicy.models.policy import PackedTokens
from onpolicy.parity import ParityCounts, compare_log_probs
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.cluster_engines import MakeEngines
from onpolicy.trajectory import Completion
from onpolicy.types import Request

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 31
"""Rows that are kept of each engine."""


def attribute_to_operators(config: ExplainConfig, make_engines: MakeEngines = EnginePair) -> Result:
    """Start both engines, keep what every operator was given and made, and share out the mismatch."""
    inputs = Inputs.of(config)
    contract = inputs.contract(aligned=config.plan.starts_aligned)
    _require_recorded(contract, config.train_backend)
    with look_through(config, inputs, contract, make_engines) as microscope:
        return {"by": "operators", **measure(microscope), **told(contract)}


def measure(microscope: Microscope) -> Result:
    """The table of what operators contribute to the mismatch of two engines that run."""
    engines, directory = microscope.engines, microscope.directory
    microscope.sample()
    _require_room(Recording.of(read_calls(directory)))
    (directory / ALL_ROWS).touch()
    try:
        completions = microscope.sample()
    finally:
        (directory / ALL_ROWS).unlink()
    log_probs, recorded = microscope.score(completions, Recorder(keeps_rows=True))
    whole = kept_rows([calls for rank in recorded for calls in rank.passes])
    together, differ = joined(rows_by_rank(read_calls(directory)), whole)
    rollout, train = in_both(together, whole)
    require_choices(rollout, whole)
    forced_log_probs, forced = microscope.score(completions, Forced(recorded=rollout))
    own = gathered(apart for rank in forced for apart in rank.apart)
    exact = ExactModel(exact_policy(engines))
    result = shares(
        exact,
        list(zip(microscope.requests, completions, strict=True)),
        microscope.temperature,
        (rollout, train, own),
        (log_probs, forced_log_probs),
    )
    not_recorded = _names(whole.keys() - train.keys())
    return {**result, "only_in_one": not_recorded, "ranks_differ": _names(differ)}


def _names(points: Iterable[Point]) -> list[str]:
    return sorted({f"{site[1]} of {site[0]}" for site, _ in points})


def shares(
    exact: ExactModel,
    answers: Sequence[tuple[Request, Completion]],
    temperature: float,
    rows: tuple[KeptRows, KeptRows, KeptRows],
    log_probs: tuple[Sequence[Tensor], Sequence[Tensor]],
) -> Result:
    """What every point has of the mismatch, sequence by sequence, and the table of it.

    A token for which a router chose other experts ends its sequence, in all but the counts.
    rows: of the rollout and the trainer, and `own` of `contributions`. log_probs: float32 [R] of each
    response, the trainer's, and those that it gives to the rollout's logits.
    """
    found: list[Contributions] = []
    counts, others = ParityCounts(), other_choices(*rows[:2])
    for number, (request, completion) in enumerate(answers):
        logger.info("sharing out the mismatch of sequence %d of %d", number + 1, len(answers))
        tokens, prompt_len = request.prompt_ids + completion.response_ids, len(request.prompt_ids)
        end = count_before(others, torch.tensor(prefix_keys(tokens)))
        theirs = torch.tensor(completion.rollout_log_probs)
        ours, forced = (scores[number] for scores in log_probs)
        counts += compare_log_probs(ours, theirs)[0]
        if end <= prompt_len:
            continue
        batch = PackedTokens.after_prompts([tokens[:end]], [prompt_len], temperature)
        own = contributions(exact, batch, *rows)
        theirs, ours, forced = (x[: own.tokens] for x in (theirs, ours, forced))
        own.points[(LOG_SOFTMAX, "made")] = _of_log_softmax(own, theirs, ours, forced)
        found.append(own)
    _require_several(len(found), len(answers), len(others))
    told = {"num_other_choices": len(others), "num_left_out": len(answers) - len(found)}
    return {**counts.report(), **told, **table(found)}


def _of_log_softmax(
    own: Contributions, theirs: Tensor, ours: Tensor, forced: Tensor
) -> Contribution:
    """What lies between logits and log-probabilities, which the exact KL divergence does not have."""
    exactly, exactly_ours = own.log_probs
    shift = float((theirs.double() - exactly).sum() - (ours.double() - exactly_ours).sum())
    own_shift = float((theirs.double() - forced.double()).sum())
    return Contribution(kl=0.0, own_kl=0.0, shift=shift, own_shift=own_shift)


def _require_several(count: int, of: int, others: int) -> None:
    if count < min(of, 2):
        raise ConfigError(
            f"--attribution=operators: routers chose other experts for {others} tokens, and before "
            f"these {count} of {of} sequences have sampled one; {SEVERAL_PROMPTS}. Raise "
            "--num-prompts, or lower --max-prompt-len."
        )


def _require_recorded(contract: NumericsContract, train_backend: str) -> None:
    for found, rule in (
        (
            contract.shapes.experts and train_backend == "megatron",
            "of mixtures it has the rows of --train-backend fsdp alone",
        ),
        (contract.device != "cpu", "it has not run on a GPU"),
    ):
        if found:
            raise ConfigError(
                f"--attribution=operators: {rule}. Use --attribution=kinds, or explain without it."
            )


def _require_room(recording: Recording) -> None:
    def size(rows: Rows) -> int:
        given, _, made = rows.widths
        return 4 * len(rows.keys) * (sum(given) + sum(made))

    total = sum(size(rows) for by_rank in recording.values() for rows in by_rank.values())
    if total > MOST_BYTES:
        raise ConfigError(
            f"--attribution=operators: the rows of all operators take {total / 2**30:.1f} GiB of each "
            f"engine, and {MOST_BYTES / 2**30:.0f} GiB are kept at most. Lower --num-prompts, "
            "--max-prompt-len or --max-new-tokens."
        )
