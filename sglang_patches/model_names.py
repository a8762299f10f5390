"""Lets /v1/responses take any model's name, as SGLang's other endpoints do. In every contract.

A server has one model, and a client that has served its users as "any" so far keeps doing so.
Source: OpenAIServingResponses._validate_model, sglang/srt/entrypoints/openai/serving_responses.py. Can
go when all endpoints of SGLang treat a name alike.
"""

from __future__ import annotations

from typing import Any

from sglang_patches import registry

TARGET = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses._validate_model"


def install() -> None:
    registry.hook(TARGET, _accept, "replace")


def _accept(_: Any, name: str | None) -> None:
    """There is no error to answer with."""
