"""Acceptance of any model name by /v1/responses, as by SGLang's other endpoints. In every contract.

A server has one model, and existing clients may use any name for it, such as "any".

Source: OpenAIServingResponses._validate_model, sglang/srt/entrypoints/openai/serving_responses.py.
Can go when all endpoints of SGLang treat a name alike.
"""

from __future__ import annotations

from typing import Any

from sglang_patches import registry

TARGET = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses._validate_model"


def install() -> None:
    registry.hook(TARGET, _accept, "replace")


def _accept(_: Any, name: str | None) -> None:
    """Return no error for any name."""
