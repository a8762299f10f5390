"""Microscope: the same tokens through both engines, everything recorded, and the first difference.

The trainer is recorded on every rank while it scores (`Trainer.on_each_rank`). One pass keeps
digests. If something differs, the tokens are run again and the tensors of one call, the suspected
one, are kept on either side; then the operator runs alone on them.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onpolicy.config.tool_flags import ExplainConfig
from onpolicy.explain.explain_inputs import Inputs, Result, compare_weights, made_by
from onpolicy.explain.proof import prove
from onpolicy.explain.source import Source, count_sites, first_source
from onpolicy.explain.taps.attachment import passes_of, tapped
from onpolicy.explain.taps.evidence import Evidence, clear_evidence, read_evidence
from onpolicy.explain.taps.recorder import (
    HEAD,
    SUSPECT,
    Call,
    Recorder,
    Recording,
    Site,
    read_calls,
)
from onpolicy.explain.taps.row_keys import prefix_keys
from onpolicy.models.policy import PolicyModel
from onpolicy.ops import make_operators
from onpolicy.parity import ParityCounts, compare_log_probs
from onpolicy.run.commands.verification import draw_adapters
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.cluster_engines import MakeEngines
from onpolicy.training.engine import ShardedModel
from onpolicy.training.policy_trainer import PolicyTrainer
from onpolicy.trajectory import Completion
from onpolicy.types import Request

logger = logging.getLogger(__name__)

LOG_SOFTMAX: Site = (HEAD, "log_softmax", 0)
"""The site that remains when a token's logits agree and its log-probability does not."""

Scored = list[torch.Tensor]
"""Log-probabilities of each response: float32 [R]."""


def explain(config: ExplainConfig, make_engines: MakeEngines = EnginePair) -> Result:
    """Start both engines, record them, and return where they diverge."""
    inputs = Inputs.of(config)
    contract = inputs.contract(aligned=config.plan.starts_aligned)
    directory = inputs.directory / "taps"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, mode=0o700)
    try:
        with inputs.engines(contract, directory, make_engines) as engines:
            if not config.case:
                draw_adapters(engines, config)
            logger.info("pushing the trainer's weights")
            engines.push_weights(0)
            if config.case:
                compare_weights(config, engines.weight_digest)
            microscope = Microscope(engines, directory, inputs.requests, config.temperature)
            return {**microscope.look(), **made_by(contract)}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Microscope:
    """A comparison of two engines with the same weights on some requests."""

    def __init__(
        self, engines: EnginePair, directory: Path, requests: Sequence[Request], temperature: float
    ):
        self.engines, self.directory = engines, directory
        self.requests, self.temperature = requests, temperature

    def look(self) -> Result:
        """Sample, score, and compare; if something differs, find out where it began."""
        completions = self.sample()
        rollout = Recording.of(read_calls(self.directory))
        recorder = Recorder(shares=rollout.shares(), ranks=rollout.ranks)
        log_probs, recorded = self.score(completions, recorder)
        train = recordings(recorded)
        responses: list[Result] = [
            {
                "tokens": completion.token_ids,
                "rollout_log_probs": completion.log_probs,
                "train_log_probs": ours.tolist(),
            }
            for completion, ours in zip(completions, log_probs, strict=True)
        ]
        compared = [
            compare_log_probs(ours, torch.tensor(completion.rollout_log_probs.array))
            for completion, ours in zip(completions, log_probs, strict=True)
        ]
        result: Result = {
            **sum((counts for counts, _ in compared), ParityCounts()).report(),
            **dict.fromkeys(("first_token", "source", "proof")),
            "only_in_one": _only_in_one(rollout, train),
            "rollout_ranks": rollout.ranks,
            "train_ranks": len(train),
            "sites": [asdict(counts) for counts in count_sites(rollout, train)],
            "responses": responses,
        }
        firsts = [token for _, token in compared]
        if (found := self._source(rollout, train, completions, firsts)) is not None:
            number, source = found
            if (token := firsts[number]) is not None:
                sides = ("rollout_log_prob", "train_log_prob")
                apart = {side: responses[number][f"{side}s"][token] for side in sides}
                result["first_token"] = {"sequence": number, "response_position": token, **apart}
            result["source"] = {"sequence": number, **asdict(source), "name": source.name}
            result["proof"] = self._prove(source, completions, recorder)
        return result

    def sample(self) -> list[Completion]:
        """Return the servers' answers to the requests, without cached prefixes and earlier
        recordings."""
        if self.engines.config.engine.colocate:
            self.engines.push_again()  # scoring took the servers' memory
        for client in self.engines.rollout.clients:
            client.flush_cache()
        for file in self.directory.glob("*.pass"):
            file.unlink()
        logger.info("sampling %d responses, recorded", len(self.requests))
        return self.engines.generate(self.requests)

    def score(
        self, completions: Sequence[Completion], recorder: Recorder, evidence_of: int = 0
    ) -> tuple[Scored, list[Recorded]]:
        """Return log-probabilities, and each trainer rank's recording."""
        logger.info("scoring them with the trainer, recorded")
        recorded: list[Recorded] = []

        def log_probs(*asked: Any) -> Scored:
            on_each_rank = self.engines.trainer.on_each_rank
            answers = on_each_rank(recorded_log_probs, recorder, *asked, evidence_of)
            recorded.extend(own for _, own in answers)
            return answers[0][0]

        scores = self.engines.score(self.requests, completions, self.temperature, log_probs)
        return scores, recorded

    def _source(
        self,
        rollout: Recording,
        train: Sequence[Recording],
        completions: Sequence[Completion],
        firsts: Sequence[int | None],
    ) -> tuple[int, Source] | None:
        """Return (sequence, source) for the sequence whose first differing token is the earliest.

        If no token differs, rows may: then the first sequence with a differing row counts. firsts:
        the first differing token of each sequence.
        """
        for number in sorted(range(len(firsts)), key=lambda i: (firsts[i] is None, firsts[i] or 0)):
            prompt, response = self.requests[number].prompt_ids, completions[number].response_ids
            token = firsts[number]
            end = len(prompt) + (len(response) - 1 if token is None else token)
            keys = prefix_keys([*prompt, *response][:end])
            if (source := first_source(rollout, train, keys)) is not None:
                return number, source
            if token is not None:
                logits, key = (HEAD, "linear", 0), keys[-1]
                return number, Source("operator", LOG_SOFTMAX, logits, position=end - 1, key=key)
        return None

    def _prove(
        self, source: Source, completions: Sequence[Completion], recorder: Recorder
    ) -> Result | None:
        """Run the operator alone; return None where there is none, or its call did not come again."""
        if source.cause in ("not computed", "between operators") or source.site == LOG_SOFTMAX:
            return None
        logger.info("running the tokens again, to keep the tensors of the %s", source.name)
        clear_evidence(self.directory)
        wanted = json.dumps({"site": source.site, "key": source.key})
        (self.directory / SUSPECT).write_text(wanted)
        rank = source.ranks[0]
        recorder = replace(recorder, suspect=(source.site, source.key, rank))
        self.sample()
        recorded = self.score(completions, recorder, source.train_ranks[0])[1]
        ours, theirs = evidence_in(recorded), read_evidence(self.directory)
        if rank not in theirs or ours is None:
            return None
        return asdict(prove(theirs, ours, make_operators(self.engines.contract), rank))


def _only_in_one(rollout: Recording, train: Sequence[Recording]) -> list[str]:
    """Return the sites that one side lacks, or that a rollout rank has without a trainer's
    counterpart."""
    ours: dict[Site, set[int]] = {}
    for recording in train:
        for site, by_rank in recording.items():
            ours.setdefault(site, set()).update(by_rank)
    sites = set(rollout) ^ set(ours)
    sites |= {site for site in set(rollout) & set(ours) if rollout[site].keys() - ours[site]}
    return sorted({f"{operator} of {module}" for module, operator, _ in sites})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The recording of one trainer rank over some forward passes, each with whole rows."""

    tensor_rank: int
    """The rank's number among the ranks that share every linear."""

    passes: list[list[Call]]
    evidence: Evidence | None


def recorded_log_probs(
    trainer: PolicyTrainer,
    recorder: Recorder,
    sequences: Sequence[list[int]],
    prompt_lens: Sequence[int],
    temperature: float,
    kept_tokens: Sequence[list[bytes]] = (),
    evidence_of: int = 0,
) -> tuple[list[Tensor], Recorded]:
    """Return `Trainer.log_probs`, and this rank's recording of that call by a new recorder.

    evidence_of: the tensor-parallel rank whose evidence is wanted.
    """
    with recording(trainer.policy, recorder) as (rank, passes):
        scores = trainer.log_probs(sequences, prompt_lens, temperature, kept_tokens)
    evidence = recorder.evidence if rank == evidence_of else None
    return scores, Recorded(tensor_rank=rank, passes=passes, evidence=evidence)


@contextmanager
def recording(model: ShardedModel, recorder: Recorder) -> Iterator[tuple[int, list[list[Call]]]]:
    """Record every forward pass of a model; yield this rank's number among the ranks that share
    every linear, and a list that grows by the calls of each pass."""
    if isinstance(model.module, PolicyModel):
        rank, watched = 0, passes_of(model.module, recorder)
    else:
        from onpolicy.explain import megatron  # which may not be installed

        rank, watched = megatron.tensor_rank(), megatron.passes_of(model.module, recorder)
    with model.around_operators(partial(tapped, recorder=recorder)), watched as passes:
        yield rank, passes


def recordings(parts: Sequence[Recorded]) -> list[Recording]:
    """Return the recording of each tensor-parallel rank, merged from ranks that have some rows and
    layers."""
    passes: dict[int, list[list[Call]]] = {}
    for part in parts:
        passes.setdefault(part.tensor_rank, []).extend(part.passes)
    return [Recording.of(own) for _, own in sorted(passes.items())]


def evidence_in(parts: Sequence[Recorded]) -> Evidence | None:
    """Return the evidence of some rank. If several have the prefix, it is the last one's, as its
    row is (`onpolicy.explain.taps.recorder.Rows.of`)."""
    return next((p.evidence for p in reversed(parts) if p.evidence is not None), None)
