"""Answers of GPT-OSS in the Harmony form, whose messages end with tokens that SGLang's parser
needs.

Format: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

PARSER = "gpt-oss"
"""The name of SGLang's tool-call and reasoning parsers for such answers."""

BEGIN, CALL_END = "<|start|>", "<|call|>"


def with_call_marks(text: str) -> str:
    """Return an answer without its stop token in the form in which SGLang's parser finds a last
    call.

    The parser needs the token that ends a call, which is also a stop token. Models end some of
    their calls with the token of a final answer, and these count as calls too
    (sgl-project/sglang#10576). It also needs the beginning of the call's message, which is in the
    prompt if the answer calls at once.
    """
    before, begin, message = text.rpartition(BEGIN)
    header, has_text, _ = message.partition("<|message|>")
    if not has_text or " to=" not in header:
        return text
    return f"{before}{begin or BEGIN + 'assistant'}{message}{CALL_END}"


def has_marks(text: str) -> bool:
    """Return whether an answer has the Harmony form; of others the parser would leave nothing."""
    return "<|channel|>" in text
