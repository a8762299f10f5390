"""`onpolicy bench decode`: prefill and decoding of whole SGLang servers, by batch size and context.

Prompts are sent twice: once for one token each, which measures prefill, and once for all tokens,
with their keys and values in the server's cache, which measures decoding alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onpolicy.bench.cells import Cell, cells
from onpolicy.bench.requests import random_requests
from onpolicy.bench.rollout import servers
from onpolicy.bench.setting import settings
from onpolicy.bench.turns import compare, take_turns
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.base import RolloutGroup, SamplingJob

logger = logging.getLogger(__name__)

PHASES = ("prefill", "decode")


def bench_decode(config: BenchConfig) -> dict[str, Any]:
    """Return tokens per second of either phase, for each cell and each kind of operators.

    Cells that do not fit a server's cache are under `not_measured`.
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
    measures = {kind: _Measure(config, vocab_size, group) for kind, group in groups.items()}
    runs = take_turns(measures, 1, config.repetitions)
    compared = {
        phase: compare({kind: [run[phase] for run in runs[kind]] for kind in runs})
        for phase in PHASES
    }
    for phase, result in compared.items():
        speeds = ", ".join(f"{kind} {result[kind]['tokens_per_second']:,.0f}" for kind in runs)
        where = f"{cell.batch_size} x {cell.context_len} tokens"
        logger.info(
            "%s of %s: %s tokens a second; ratio %.2f", phase, where, speeds, result["ratio"]
        )
    return cell._asdict() | compared


class _Measure:
    """A measurement of both phases of one batch on one server, in tokens per second."""

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
