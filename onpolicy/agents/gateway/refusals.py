"""Refusals of requests, in the forms of OpenAI's and Anthropic's clients."""

from __future__ import annotations

from typing import Any

_TYPES_OF_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class RefusedError(Exception):
    """A request that is answered with an HTTP status of 400 or more."""

    def __init__(self, status: int, message: str, *, code: str | None = None, field: str = ""):
        super().__init__(message)
        self.status, self.message, self.code, self.field = status, message, code, field

    def as_openai(self) -> dict[str, Any]:
        """Return the body for OpenAI's clients."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "requests"
        error = {"message": self.message, "type": kind, "param": self.field or None}
        return {"error": {**error, "code": self.code}}

    def as_anthropic(self) -> dict[str, Any]:
        """Return the body for Anthropic's clients."""
        kind = _TYPES_OF_ANTHROPIC.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def invalid(field: str, problem: str) -> RefusedError:
    """Return the refusal of a field whose value cannot be read or honoured."""
    return RefusedError(400, f"{field}: {problem}", code="invalid_value", field=field)


def unsupported(field: str, problem: str) -> RefusedError:
    """Return the refusal of a field that cannot be honoured here."""
    return RefusedError(400, problem, code="unsupported_parameter", field=field)


def session_is_over() -> RefusedError:
    """Return the refusal of a key that opens no session: it never did, or its session has ended."""
    message = "Incorrect API key provided: a key opens one session, and dies with it."
    return RefusedError(401, message, code="invalid_api_key")
