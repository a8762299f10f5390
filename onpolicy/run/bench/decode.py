"""`onpolicy bench decode`: prefill and decoding of whole SGLang servers, by batch size and context.

Prompts are sent twice: once for one token each, which is their prefill, and once for all tokens, when
the server has their keys and values already, so that the second time is decoding alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onpolicy.config.tools import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.base import RolloutGroup, SamplingJob
from onpolicy.run.bench.alternate import compare, take_turns
from onpolicy.run.bench.cells import Cell, cells
from onpolicy.run.bench.requests import random_requests
from onpolicy.run.bench.rollout import servers
from onpolicy.run.bench.setting import settings

PHASES = ("prefill", "decode")


def bench_decode(config: BenchConfig) -> dict[str, Any]:
    """Tokens per second of either phase, for each cell and each kind of operators.

    What does not fit a server's cache is named under `not_measured`.
    """
    hf_config = load_config(config.model.hf_checkpoint)
    with servers(config) as (groups, cache_tokens):
        fitting, not_measured = cells(config, hf_config.max_position_embeddings, cache_tokens)
        return {
            "what": "decode",
            "unit": "tokens per second",
            "cells": [_measured(config, hf_config.vocab_size, groups, cell) for cell in fitting],
            "not_measured": not_measured,
            **settings(config),
        }


def _measured(
    config: BenchConfig, vocab_size: int, groups: Mapping[str, RolloutGroup], cell: Cell
) -> dict[str, Any]:
    config = replace(config, num_prompts=cell.batch_size, prompt_len=cell.context_len)
    measures = [_Measure(config, vocab_size, group) for group in groups.values()]
    runs = take_turns(measures, 1, config.repetitions)
    return {**cell._asdict(), **{phase: _compared(groups, runs, phase) for phase in PHASES}}


def _compared(
    kinds: Mapping[str, RolloutGroup], runs: Sequence[Sequence[Mapping[str, float]]], phase: str
) -> dict[str, Any]:
    speeds = [[run[phase] for run in of_kind] for of_kind in runs]
    return compare(dict(zip(kinds, speeds, strict=True)))


class _Measure:
    """Both phases of one batch on one server, in tokens per second."""

    def __init__(self, config: BenchConfig, vocab_size: int, group: RolloutGroup):
        self.group = group
        self.requests = {
            "prefill": random_requests(replace(config, max_new_tokens=1), vocab_size),
            "decode": random_requests(config, vocab_size),
        }
        self.tokens = {
            "prefill": config.num_prompts * config.prompt_len,
            "decode": config.num_prompts * config.max_new_tokens,
        }

    def __call__(self) -> dict[str, float]:
        for client in self.group.clients:
            client.flush_cache()
        return {phase: self._speed(phase) for phase in PHASES}

    def _speed(self, phase: str) -> float:
        started = time.perf_counter()
        self.group.generate(SamplingJob(self.requests[phase]))
        return self.tokens[phase] / (time.perf_counter() - started)
