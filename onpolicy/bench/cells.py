"""Cells of `onpolicy bench decode`: batches of contexts that fit a model and a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from onpolicy.bench.work import fit_bench
from onpolicy.config.sglang_flags import max_total_tokens
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.errors import ConfigError
from onpolicy.rollout.engine_args import CACHE_MARGIN, CONTEXT_MARGIN

CONTEXT_LENS = (1024, 8192, 32768)

UNLIMITED = 1 << 62


class Cell(NamedTuple):
    """A batch of sequences that a server prefills and decodes together."""

    batch_size: int
    context_len: int
    """Tokens of each prompt."""


def cells(
    config: BenchConfig, context: int, cache_tokens: int = UNLIMITED
) -> tuple[list[Cell], list[dict[str, Any]]]:
    """Return the cells that fit a model's context and a cache of so many tokens, and the others
    with the reason in `why`."""
    fitting, others = [], []
    for cell in (Cell(b, c) for c in config.context_lens for b in config.batch_sizes):
        length = cell.context_len + config.max_new_tokens
        needed = cell.batch_size * (length + CACHE_MARGIN)
        if length + CONTEXT_MARGIN > context:
            others.append({**cell._asdict(), "why": f"the model's context has {context} tokens"})
        elif needed > cache_tokens:
            why = f"a server's cache of {cache_tokens} tokens does not hold {needed}"
            others.append({**cell._asdict(), "why": why})
        else:
            fitting.append(cell)
    return fitting, others


def fit_decode(config: BenchConfig, hf_config: PretrainedConfig) -> BenchConfig:
    """Return the configuration with the largest batch and the longest prompts, for which servers
    are made.

    Raises ConfigError as `require_cells` does.
    """
    config, context = fit_bench(config, hf_config), hf_config.max_position_embeddings
    if not config.context_lens:
        usual = replace(config, context_lens=CONTEXT_LENS)
        own = replace(config, context_lens=(config.prompt_len,))
        config = usual if cells(usual, context)[0] else own
    fitting = require_cells(config, context, max_total_tokens(config.sglang_args) or UNLIMITED)
    most, longest = (max(sizes) for sizes in zip(*fitting, strict=True))
    return replace(config, num_prompts=most, prompt_len=longest)


def require_cells(config: BenchConfig, context: int, cache_tokens: int) -> list[Cell]:
    """Return the cells that can be measured. Raises ConfigError if there are none."""
    fitting, others = cells(config, context, cache_tokens)
    if not fitting:
        lens, sizes = (" ".join(map(str, x)) for x in (config.context_lens, config.batch_sizes))
        raise ConfigError(
            f"--context-lens={lens}, --batch-sizes={sizes}: {others[0]['why']}, and "
            f"--max-new-tokens {config.max_new_tokens} come on top. Give shorter or smaller ones."
        )
    return fitting
