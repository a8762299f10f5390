"""Environments of the `verifiers` package, unmodified: they act through a gateway session.

Its client is the `openai` one at the session's address, its dataset gives the prompts, and its
rubric the reward. An error in it, also in the functions of its rubric, fails the episode; an answer
without text is an error to the package's clients, and ends an episode that its rubric scores.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any
from unittest.mock import patch

from onpolicy.agents.session_address import session_of
from onpolicy.errors import ConfigError, in_one_line
from onpolicy.rollout.rollouter import Episode
from onpolicy.types import Prompt

INPUT = "verifiers_input"
"""The field of a prompt's metadata that holds the row of the environment's dataset."""

EMPTY = "EmptyModelResponseError"
"""The package's name for an answer with neither text nor calls (its module errors)."""

_loading = threading.Lock()
_scoring_errors: ContextVar[list[str]] = ContextVar("errors that a rubric logged")


def load(name: str, arguments: str) -> Any:
    """Return the environment, loaded once per process; `arguments` is a JSON object.

    Raises ConfigError where it cannot be made, or its rubric compares episodes.
    """
    with _loading:
        return _load(name, arguments)


@cache
def _load(name: str, arguments: str) -> Any:
    try:
        verifiers = importlib.import_module("verifiers")
        # It would set handlers of SIGINT and SIGTERM: a thread cannot, and a run has its own.
        with patch("signal.signal"):
            made = verifiers.load_environment(name, **json.loads(arguments))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--environment=verifiers:{name}: verifiers is not installed ({error}). Run pip install "
            "'onpolicy[agents]'."
        ) from error
    except Exception as error:  # an environment is a program of somebody else's
        raise ConfigError(
            f"--environment=verifiers:{name}: cannot be loaded with --environment-args={arguments}: "
            f"{in_one_line(error)}. Install its package, and give it the arguments that it takes."
        ) from error
    if made.requires_group_rollouts:
        raise ConfigError(
            f"--environment=verifiers:{name}: functions of its rubric compare the episodes of a "
            "prompt, and episodes are scored one by one. Use one whose rewards are of an episode alone."
        )
    logging.getLogger("verifiers.rubrics").addHandler(_RubricErrors(logging.ERROR))
    return made


class _RubricErrors(logging.Handler):
    """A handler that keeps the errors that a rubric logs, and counts as a reward of 0."""

    def emit(self, record: logging.LogRecord) -> None:
        if (errors := _scoring_errors.get(None)) is not None:
            errors.append(record.getMessage())


@contextmanager
def _watched() -> Iterator[list[str]]:
    """Yield the list of errors that rubrics log in the context."""
    errors: list[str] = []
    token = _scoring_errors.set(errors)
    try:
        yield errors
    finally:
        _scoring_errors.reset(token)


def rows(name: str, arguments: str) -> Iterator[dict[str, Any]]:
    """Yield the environment's training set as rows of a prompt file."""
    for row in load(name, arguments).get_dataset():
        label = row.get("answer")
        label = "" if label is None else str(label)
        yield {"prompt": row["prompt"], "label": label, INPUT: row}


async def roll_out(turns: Any, prompt: Prompt, *, name: str, arguments: str) -> Episode:
    """Return an episode with the prompt's row of the dataset. Raises RuntimeError if that fails."""
    environment = await asyncio.to_thread(load, name, arguments)
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient

    session = session_of(prompt)
    async with AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, max_retries=0, timeout=None
    ) as client:
        with _watched() as errors:
            found = await environment.run_rollout(
                dict(prompt.metadata[INPUT]),
                OpenAIChatCompletionsClient(client),
                session.model,
                environment.sampling_args,
            )
    error = found["error"]
    is_empty = error is not None and error["error"] == EMPTY
    if error and not is_empty:
        raise RuntimeError(f"verifiers:{name}: {error['error_chain_repr']}")
    if errors:
        raise RuntimeError(f"verifiers:{name}: {'; '.join(errors)}")
    metrics = {f"verifiers/{key}": float(value) for key, value in (found["metrics"] or {}).items()}
    return Episode(
        reward=float(found["reward"]),
        metrics={**metrics, "verifiers/empty_answers": float(is_empty)},
        info={"ended": found["stop_condition"], "is_truncated": found["is_truncated"]},
    )
